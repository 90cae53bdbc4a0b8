"""Keep names of people out of a plan: which columns name somebody, and which of a hospital's own words a plan has.

A plan goes to every hospital. A value that few patients have may be a name, a file or an address, whatever its column
is called. So a plan has the values that at least `LEAST_NAMED` patients have, and no sentences; the others are "other"
there. Nor does a comment of it say how many patients there are.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping

LEAST_NAMED = 5  # patients who have a value that a plan names; a hospital's usual min_patients_per_metric
LONGEST_NAMED = 60  # letters of such a value: longer ones are sentences
OTHER = "other"
# Words of columns that name somebody, a patient or who looked after one, in ten languages. A word that means something
# else in another of them is left out: Turkish "ad" is a disease in English.
PERSONAL = frozenset(
    """
    name names surname forename firstname lastname fullname initials address street city town zip postcode phone
    telephone email mail file filename path uri url id ids pid uid uuid guid identifier identification key mrn ssn nhs
    accession record pseudonym dob birthdate birthday postal physician doctor surgeon radiologist pathologist
    clinician nurse operator reader annotator rater
    nachname vorname familienname geburtsname zuname rufname adresse anschrift strasse wohnort plz postleitzahl telefon
    datei dateiname pfad fallnummer patientennummer aktenzeichen kennung versichertennummer geburtsdatum
    fallnr geb gebdat nr svnr ahv kvnr naissance ipp nir nacimiento nhc nss nascita fiscale nascimento
    arzt arztin einweiser zuweiser uberweiser behandler befunder operateur untersucher hausarzt
    nom prenom rue ville courriel fichier chemin identifiant dossier medecin chirurgien
    nombre apellido apellidos direccion calle ciudad correo archivo fichero ruta identificador dni expediente medico
    medica cirujano
    nome cognome indirizzo citta percorso identificativo cartella chirurgo
    naam voornaam achternaam adres straat woonplaats bestand bestandsnaam bsn geboortedatum dossiernummer huisarts
    behandelaar
    imie imiona nazwisko ulica miasto miejscowosc pocztowy pesel plik sciezka identyfikator urodzenia lekarz lekarka
    adi soyad soyadi isim sokak cadde mahalle sehir kimlik dosya hekim doktor
    apelido sobrenome morada endereco rua cidade telefone telemovel correio ficheiro arquivo prontuario utente nif cpf
    ονομα επωνυμο ονοματεπωνυμο διευθυνση οδος πολη τηλεφωνο αμκα ταυτοτητα φακελος φακελου αρχειο γιατρος ιατρος
    """.split()  # noqa: SIM905 - one word beside the other
)
ENDINGS = ("name", "arzt", "arztin")  # of a German word in one piece: Patientenname, Oberarzt

YES = frozenset(
    """
    yes ja oui si sí sì tak evet ναι sim true positive positiv positif positivo malignant maligne bösartig
    ill sick diseased krank dead died deceased tot verstorben gestorben décédé décédée fallecido deceduto x wahr vrai
    event death relapse recurred
    """.split()  # noqa: SIM905 - as above
)
PLAIN = str.maketrans({"ß": "ss", "ı": "i", "ł": "l", "Ł": "L", "ø": "o"})  # letters that Unicode does not take apart
UMLAUTS = str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue", "Ä": "Ae", "Ö": "Oe", "Ü": "Ue"})


def plain(text: str, also: str = "._+ -") -> str:
    """Return a text in letters and digits of ASCII and in `also`: by default as a label in a plan.

    >>> plain("Süd Klinik", "_-"), plain("bösartig (G3)")
    ('Sued-Klinik', 'boesartig -G3')
    """
    spelt = unicodedata.normalize("NFC", text).translate(UMLAUTS).translate(PLAIN)
    letters = unicodedata.normalize("NFKD", spelt).encode("ascii", "ignore").decode()
    return re.sub(f"[^A-Za-z0-9{also}]+", "-", letters).strip(also)[:63]


def names_somebody(column: str) -> bool:
    """Return whether a column is called like a name, an address, a file or an identifier.

    >>> [names_somebody(name) for name in ("Nachname", "file_name", "caseID", "Prénom", "Soyadı", "Oberärztin")]
    [True, True, True, True, True, True]
    >>> [names_somebody(name) for name in ("age", "pathology", "AD", "Ηλικία")]
    [False, False, False, False]
    """
    text = unicodedata.normalize("NFKD", column.translate(PLAIN))
    text = "".join(letter for letter in text if not unicodedata.combining(letter))
    words = re.findall(r"[^\W\d_]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", text).lower())
    return any(word in PERSONAL or word.endswith(ENDINGS) for word in words)


def yes_last(classes: Iterable[str]) -> list[str]:
    """Return classes with those that say yes last: of two, a report tells the sensitivity for the last.

    >>> yes_last(["ja", "nein"]), yes_last(["malignant", "naevus"]), yes_last(["no", "yes"])
    (['nein', 'ja'], ['naevus', 'malignant'], ['no', 'yes'])
    """
    return sorted(classes, key=lambda name: name.casefold() in YES)


def plans_words(patients: Mapping[str, int]) -> dict[str, str]:
    """Return what a plan calls each of the hospitals' values. patients: how many have each.

    >>> plans_words({"Benign": 9, "benign": 20, "Mueller": 4, "Malignant": 5})
    {'Benign': 'benign', 'benign': 'benign', 'Mueller': 'other', 'Malignant': 'Malignant'}
    """
    spelt: dict[str, str] = {}
    counts = Counter[str]()
    for value in sorted(patients, key=lambda value: (-patients[value], value)):
        counts[spelt.setdefault(value.casefold(), value)] += patients[value]
    named = {own for own, count in counts.items() if count >= LEAST_NAMED and len(own) <= LONGEST_NAMED}
    return {value: own if (own := spelt[value.casefold()]) in named else spelt.get(OTHER, OTHER) for value in patients}


def renamed(words: Mapping[str, str]) -> dict[str, str]:
    """Return the values that a plan calls something else."""
    return {own: plans for own, plans in words.items() if own != plans}
