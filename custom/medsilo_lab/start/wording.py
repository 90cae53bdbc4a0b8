"""Keep people's names out of plans: find columns that name people, and choose names in plans for words in the data.

Every hospital receives the plan. If few patients have a value in a column, the value may be a name, a file or an
address. A plan therefore contains no sentences. A value that fewer than `LEAST_NAMED` patients have is called "other"
in the plan.

The comments in a plan give no numbers of patients. If the data do not name the patients, even five cases may be from a
single person, so a plan contains only words in `COMMON`. Words that are not in `COMMON` are called class-1, class-2 and
so on in the plan. A plan never contains words that look like a person's name.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from medsilo.core.text import WHOLE

# a plan may contain a value that at least this number of patients have; min_patients_per_metric has the same default
LEAST_NAMED = 5
LONGEST_NAMED = 60  # maximum length of a value in a plan, because longer values may be sentences
OTHER = "other"
# Words in the names of columns with people's names or identifiers, in ten languages. A word is omitted if it has a
# different meaning in another language. For example, the Turkish word "ad" (name) is omitted, because it also
# abbreviates a disease.
PERSONAL = frozenset(
    """
    name names surname forename firstname lastname fullname initials address street city town zip postcode phone
    telephone email mail file filename path uri url id ids pid uid uuid guid identifier identification key mrn ssn nhs
    accession record pseudonym dob birthdate birthday postal physician doctor surgeon radiologist pathologist
    clinician nurse operator reader annotator rater attending consultant reviewer reviewed signed by seen
    nachname vorname familienname geburtsname zuname rufname adresse anschrift strasse wohnort plz postleitzahl telefon
    datei dateiname pfad fallnummer patientennummer aktenzeichen kennung versichertennummer geburtsdatum
    fallnr geb gebdat nr svnr ahv kvnr naissance ipp nir nacimiento nhc nss nascita fiscale nascimento
    von gesehen behandelt befundet
    arzt arztin einweiser zuweiser uberweiser behandler befunder operateur untersucher hausarzt
    nom prenom rue ville courriel fichier chemin identifiant dossier medecin chirurgien
    nombre apellido apellidos direccion calle ciudad correo archivo fichero ruta identificador dni expediente medico
    medica cirujano visto por
    nome cognome indirizzo citta percorso identificativo cartella chirurgo
    naam voornaam achternaam adres straat woonplaats bestand bestandsnaam bsn geboortedatum dossiernummer huisarts
    behandelaar
    imie imiona nazwisko ulica miasto miejscowosc pocztowy pesel plik sciezka identyfikator urodzenia lekarz lekarka
    adi soyad soyadi isim sokak cadde mahalle sehir kimlik dosya hekim doktor
    apelido sobrenome morada endereco rua cidade telefone telemovel correio ficheiro arquivo prontuario utente nif cpf
    ονομα επωνυμο ονοματεπωνυμο διευθυνση οδος πολη τηλεφωνο αμκα ταυτοτητα φακελος φακελου αρχειο γιατρος ιατρος
    """.split()  # noqa: SIM905 - one word beside the other
)
ENDINGS = ("name", "arzt", "arztin")  # endings of German compound words, such as Patientenname and Oberarzt

# Words for diagnoses, findings, places and kinds of people. A word in COMMON does not count as a person's name.
COMMON = frozenset(
    """
    a an and of the in on at to with without not no non none or other others unknown never ever former formerly current
    i ii iii iv v low lower high higher medium moderate mild severe small large left right upper early late first second
    third grade stage type class level group score positive negative normal abnormal absent present stable better worse
    same before after true false good poor fair male female man woman boy girl child adult infant urban rural private
    public self employed married single divorced widowed smoker smokers smoked smoking
    healthy control controls case cases disease diseased syndrome disorder lesion lesions finding findings tumor tumour
    tumors tumours cancer carcinoma adenocarcinoma squamous basal cell cells melanoma nevus nevi naevus naevi naevo mole
    keratosis benign malignant metastasis metastases metastatic primary secondary recurrent polyp adenoma glioma
    glioblastoma meningioma pituitary lymphoma leukemia leukaemia sarcoma cyst nodule nodules mass edema oedema effusion
    pneumonia pneumothorax atelectasis cardiomegaly consolidation infiltration fibrosis emphysema opacity tuberculosis
    covid bacterial viral infection fracture fractured hemorrhage haemorrhage bleeding stroke ischemic ischaemic infarct
    infarction ischemia arrhythmia atrial ventricular fibrillation flutter sinus rhythm bradycardia tachycardia angina
    afib pvc pac lbbb rbbb
    hypertension diabetes diabetic retinopathy glaucoma cataract drusen macular degeneration dementia demented alzheimer
    parkinson epilepsy seizure asthma copd cirrhosis hepatitis sepsis anemia anaemia ulcer colitis
    skin lung lungs liver kidney kidneys brain heart breast prostate colon rectum stomach spleen pancreas bladder
    bone bowel thyroid ovary uterus cervix retina eye chest head neck spine hip knee hand wrist hippocampus anterior
    posterior nucleus nuclei cytoplasm vessel vessels artery aorta vein node nodes tissue background structure
    dead alive died survived deceased censored event relapse remission response responder complete partial progression
    rest walk walking run running sit sitting stand standing lie lying sleep wake active inactive stairs
    red green blue white black brown gray grey yellow round oval
    yes ja nein oui non si sí no tak nie evet hayir ill sick well krank gesund tot lebt männlich weiblich mann frau
    homme femme hombre mujer uomo donna früh spät gut schlecht keine kein gutartig bösartig maligne bénin malin benigno
    maligno positiv negativ positif négatif positivo negativo leicht mittel schwer links rechts unbekannt
    hospital hospitals site sites center centre centers clinic clinics ward wards klinik klinikum krankenhaus zentrum
    standort hôpital hopital hospital centro ospedale szpital hastane ziekenhuis sjukhus university universität
    universitaet uniklinik institution institute lab laboratory scanner device cohort study st sankt saint
    north south east west nord süd sued ost sud est ouest norte sur oeste noord zuid oost central city north-east
    hier here there one two three four five six
    """.split()  # noqa: SIM905 - one word beside the other
)
TITLE = re.compile(
    r"(?<![^\W_])"
    r"(?:[Dd]r|[Pp]rof|Professor|Doctora?|Dott|Dra|Herr|Frau|Hr|Fr|Mrs?|Ms|Miss|Mme|Mlle|Sra?)(?:\.|[ _])[ _]*\w"
)
WRITTEN = re.compile(  # Formats in which a person's name may be written: MUELLER^HANS; Quast, Ida; I. Quast; Ida Q.
    r"\w\^\w|^[^\W\d_]{2,}, ?[A-ZÀ-Þ]|^[A-ZÀ-Þ]\. ?[A-ZÀ-Þ]\w|^[A-ZÀ-Þ]\w+ [A-ZÀ-Þ]\.$"
)
# Words in the names of hospitals. A person's name beside a word in PLACES is part of a hospital's name.
PLACES = frozenset(
    """
    st sankt saint santa hospital clinic klinik klinikum krankenhaus spital zentrum center centre hôpital hopital
    ospedale szpital hastane ziekenhuis sjukhus university universität universitaet uniklinik institute
    """.split()  # noqa: SIM905 - as above
)
# Frequent personal names. Personal names that are also diagnoses or colours are not in this list.
PEOPLE = frozenset(
    """
    anna anne maria marie mary hans peter thomas michael stefan stephan andreas wolfgang klaus jürgen juergen karl otto
    fritz heinz werner helmut monika ursula renate sabine petra claudia julia lena lea emma mia sophie sofia laura lisa
    sarah paul lukas jonas felix maximilian alexander martin christian daniel david john james robert william
    richard joseph charles christopher elizabeth jennifer linda susan jessica karen nancy margaret emily olivia
    jean pierre jacques michel françois francois louis nicolas camille chloé chloe nathalie isabelle sylvie josé jose
    juan carlos luis miguel javier antonio manuel francisco pedro pablo carmen lucía lucia pilar isabel elena marta
    giuseppe giovanni mario luigi francesco marco andrea paolo giulia chiara francesca piotr krzysztof tomasz
    katarzyna agnieszka małgorzata ewa mehmet mustafa ahmet ali ayşe ayse fatma emine elif hasan hüseyin huseyin
    mohammed mohamed muhammad ahmed fatima omar ibrahim yusuf wei ming hiroshi yuki ivan olga natalia dmitri sergei
    müller mueller muller schmidt schneider fischer weber meyer meier maier wagner becker schulz hoffmann schäfer
    schaefer bauer richter schröder schroeder neumann zimmermann krüger krueger hofmann hartmann schmitt
    werner krause lehmann köhler koehler maier huber smith johnson williams jones miller davis wilson anderson taylor
    thompson moore jackson harris robinson walker allen wright evans murphy kelly o'brien o'neill
    martin bernard dubois durand leroy moreau laurent lefebvre lefèvre roux garcía garcia gonzález gonzalez rodríguez
    rodriguez fernández fernandez lópez lopez martínez martinez sánchez sanchez pérez perez gómez gomez hernández
    hernandez díaz diaz rossi russo ferrari esposito bianchi romano colombo ricci marino greco nowak kowalski kowalska
    wiśniewski wiśniewska wójcik kowalczyk yılmaz yilmaz kaya demir şahin sahin çelik celik yıldız yildiz öztürk
    oeztuerk ozturk özdemir oezdemir ozdemir silva santos ferreira pereira oliveira rodrigues jansen de-vries
    bakker visser smit mulder nguyen tran chen wang zhang liu yang huang kim lee tanaka suzuki sato singh kumar
    patel sharma khan hussain ivanov ivanova petrov papadopoulos papadopoulou
    """.split()  # noqa: SIM905
)

YES = frozenset(
    """
    yes ja oui si sí sì tak evet ναι sim true positive positiv positif positivo malignant maligne bösartig
    ill sick diseased krank dead died deceased tot verstorben gestorben décédé décédée fallecido deceduto x wahr vrai
    event death relapse recurred
    """.split()  # noqa: SIM905 - as above
)


def names_somebody(column: str) -> bool:
    """Return True if the name of a column is usual for names of people, addresses, files or identifiers.

    >>> [names_somebody(name) for name in ("Nachname", "file_name", "caseID", "Prénom", "Soyadı", "Oberärztin")]
    [True, True, True, True, True, True]
    >>> [names_somebody(name) for name in ("age", "pathology", "AD", "Ηλικία")]
    [False, False, False, False]
    """
    text = unicodedata.normalize("NFKD", column.translate(WHOLE))
    text = "".join(letter for letter in text if not unicodedata.combining(letter))
    words = re.findall(r"[^\W\d_]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", text).lower())
    return any(word in PERSONAL or word.endswith(ENDINGS) for word in words)


def yes_last(classes: Iterable[str]) -> list[str]:
    """Sort classes so that words for yes come last. If there are two classes, a report states the sensitivity for the
    second class.

    >>> yes_last(["ja", "nein"]), yes_last(["malignant", "naevus"]), yes_last(["no", "yes"])
    (['nein', 'ja'], ['naevus', 'malignant'], ['no', 'yes'])
    """
    return sorted(classes, key=lambda name: name.casefold() in YES)


def _letters(text: str) -> list[str]:
    apart = re.sub(r"([a-zß-öø-ÿ])([A-ZÀ-ÖØ-Þ])", r"\1 \2", unicodedata.normalize("NFC", text))
    return re.findall(r"[^\W\d_]+(?:['’][^\W\d_]+)?", apart.casefold())


def is_common(text: str) -> bool:
    """Return True if a text consists of general words, single letters and numbers, and contains no personal name.

    >>> [is_common(text) for text in ("skin cancer", "Stage II", "site-3", "3", "Hodgkin", "Anna", "P-4711", "HM")]
    [True, True, True, True, False, False, True, False]
    """
    return all(len(word) == 1 or word in COMMON for word in _letters(text))


def names_a_person(text: str) -> bool:
    """Return True if a text contains a person's title or a frequent personal name, or is punctuated like a personal
    name.

    >>> [names_a_person(text) for text in ("Dr. Oz", "MUELLER^HANS", "Anna K.", "H. Quast", "Quast, H.", "Blood Group")]
    [True, True, True, True, True, False]
    """
    words = {*_letters(text)}
    written = WRITTEN.search(text.strip()) and not words & COMMON - {"a", "i", "v"}
    return bool(written or TITLE.search(text) or (words & PEOPLE - COMMON and not words & PLACES))


def names_a_place(text: str) -> bool:
    """Return True if a text resembles a hospital's name, or consists of general words only.

    >>> [names_a_place(text) for text in ("north", "st-anna", "Klinikum Quast", "Quast", "Klinik Dr. Quast")]
    [True, True, True, False, False]
    """
    return is_common(text) or (bool(PLACES & {*_letters(text)}) and not names_a_person(text))


def may_be_a_person(text: str) -> bool:
    """Return True if a value may be a person's name. For example, two or three uncommon words that begin with capital
    letters may be a person's name.

    >>> [may_be_a_person(text) for text in ("Ida Quast", "QUAST_IDA", "Skin Cancer", "private sector", "Asymptomatic")]
    [True, True, False, False, False]
    """
    parts = re.split(r"[\s_,-]+", text.strip())
    called = 1 < len(parts) < 4 and all(part[:1].isupper() and part.isalpha() and len(part) > 1 for part in parts)
    return names_a_person(text) or (called and not any(is_common(part) for part in parts))


def renamed_words(names: Collection[str]) -> str:
    """Return a text that explains why some names in a plan differ from the names in the data. If no names differ, the
    text is empty.
    """
    told = ["what few patients have is 'other'"] if OTHER in names else []
    if any(re.fullmatch(r"class-\d+", name) for name in names):
        told.append("class-1 is a word that may be a name: call it what it is")
    return "; " + ", and ".join(told) if told else ""


def plans_words(patients: Mapping[str, int], known: bool = True, called: str = "class") -> dict[str, str]:
    """For each value in the data, return its name in plans. `patients` contains the number of patients with each value.

    `known` is true if the patient of each case is known. If patients are unknown, or if any value may be a person's
    name, uncommon words are called class-1, class-2 and so on. `called` is the word before the number, by default
    "class".

    >>> plans_words({"Benign": 9, "benign": 20, "Mueller": 4, "Malignant": 5})
    {'Benign': 'benign', 'benign': 'benign', 'Mueller': 'other', 'Malignant': 'Malignant'}
    >>> plans_words({"benign": 20, "Quast": 9, "quast": 1}, known=False)
    {'benign': 'benign', 'Quast': 'class-1', 'quast': 'class-1'}
    """
    spelt: dict[str, str] = {}
    counts = Counter[str]()
    for value in sorted(patients, key=lambda value: (-patients[value], value)):
        counts[spelt.setdefault(value.casefold(), value)] += patients[value]
    short = (own for own, count in counts.items() if count >= LEAST_NAMED and len(own) <= LONGEST_NAMED)
    named = [own for own in short if own.isprintable()]  # values with line breaks are left out
    known = known and not any(map(may_be_a_person, named))
    hidden = [] if known else sorted(own for own in named if not is_common(own))
    words = {own: own for own in named} | {own: f"{called}-{place}" for place, own in enumerate(hidden, 1)}
    rest = spelt.get(OTHER, OTHER)
    return {value: words.get(spelt[value.casefold()], rest) for value in patients}


def renamed(words: Mapping[str, str]) -> dict[str, str]:
    """Return the values whose name in the plan differs from the value, each with its name in the plan."""
    return {own: plans for own, plans in words.items() if own != plans}
