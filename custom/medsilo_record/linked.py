"""A record as linked data: the Data Privacy Vocabulary with an ODRL policy, and HealthDCAT-AP of the hospital's data.

All nodes have names, so that the same record has the same text. A marked blank begins with BLANK, or is an
address under `urn:medsilo:blank:`. docs/record.shapes.ttl has the shapes that both are held to.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from medsilo.check import leaks
from medsilo.runs import paths
from medsilo_record.facts import Case, RecordEntry
from medsilo_record.outcomes import table

Node = dict[str, Any]
EU = "http://publications.europa.eu/resource/authority/"
LAW = "http://data.europa.eu/eli/reg/"
BLANK, NOWHERE = "BLANK: ", "urn:medsilo:blank:"
CATEGORIES = "https://hdeu-dcat.data.health.europa.eu/resource/authority/healthcategories"  # of Article 51
NAMED = ("csvw:name", "csvw:title", "csvw:titles")  # of releases 8 and 5
KINDS = f"{EU}dataset-type"  # which has no personal data


def name_of(case: Case, what: str) -> str:
    """Return the name of a node."""
    return f"urn:medsilo:{case.plan.hash}:{case.site or 'hospital'}:{what}"


def ref(iri: str) -> Node:
    """Return a reference to a node."""
    return {"@id": iri}


def as_jsonld(case: Case, entries: Sequence[RecordEntry]) -> str:
    """Return record.jsonld."""
    process: Node = {"@id": name_of(case, "process"), "@type": "dpv:Process", "dct:title": case.plan.algorithm.title}
    nodes = []
    for entry in (entry for entry in entries if entry.relation):
        nodes.append(_entry(case, entry))
        process.setdefault(entry.relation, []).append(ref(name_of(case, entry.key)))
    process["dpv:hasPolicy"] = ref(name_of(case, "policy"))
    return _written([process, *nodes, *_policy(case)])


def _entry(case: Case, entry: RecordEntry) -> Node:
    kinds = [entry.kind, entry.narrower] if entry.narrower and entry.key not in case.lacks else [entry.kind]
    if entry.key == "data":
        kinds = ["dpv:SyntheticData"] if case.synthetic else [entry.kind, "pd:MedicalHealth"]
    node: Node = {"@id": name_of(case, entry.key), "@type": kinds, "dct:title": entry.title}
    if entry.says:
        node["dct:description"] = list(entry.says)
    if entry.blank:
        node["rdfs:comment"] = BLANK + entry.blank
    return node


def _policy(case: Case) -> Iterator[Node]:
    """Yield what the lead may do with what leaves, and what not."""
    lead, policy = ref(name_of(case, "lead")), ref(name_of(case, "policy"))
    rules: list[Node] = []

    def rule(kind: str, action: str, target: Node, **more: Node) -> None:
        parties = {"odrl:assigner": ref(name_of(case, "controller")), "odrl:assignee": lead, "odrl:target": target}
        node = {
            "@id": name_of(case, f"rule:{len(rules)}"),
            "@type": f"odrl:{kind}",
            "odrl:action": ref(f"odrl:{action}"),
        }
        duty = {"odrl:duty": ref(name_of(case, "approved"))} if asks and kind == "Permission" else {}
        rules.append({**node, **parties, **duty, **{f"odrl:{key}": value for key, value in more.items()}})

    if asks := case.settings.approval == "required":
        yield {"@id": name_of(case, "approved"), "@type": "odrl:Duty", "odrl:action": ref("odrl:obtainConsent")}
    data, results = ref(name_of(case, "dataset")), ref(name_of(case, "results"))
    yield {**data, "@type": "odrl:Asset", "dct:title": "The hospital's own data"}
    rule("Prohibition", "read", data)
    fetched = {"dct:title": "What the lead may fetch", "dct:description": list(paths.PUBLISHED)}
    yield {**results, "@type": "odrl:Asset", **fetched}
    rule("Permission", "read", results)
    for number, leak in enumerate(leaks.leaks(case.plan)):
        asset, times = ref(name_of(case, f"asset:{number}")), ref(name_of(case, f"times:{number}"))
        yield {**asset, "@type": "odrl:Asset", "dct:title": leak.group, "dct:description": f"in rounds {leak.when}"}
        leaves, sealed = case.policy.lets_out(leak.group), case.plan.transport.sealed
        if leaves:
            most = {"odrl:operator": ref("odrl:lteq"), "odrl:rightOperand": leak.rounds}
            yield {**times, "@type": "odrl:Constraint", "odrl:leftOperand": ref("odrl:count"), **most}
            rule("Permission", "aggregate", asset, constraint=times)
        if not leaves or sealed:
            rule("Prohibition", "read", asset)
    yield {**lead, "@type": ["odrl:Party", "dpv:Recipient"], "rdfs:comment": f"{BLANK}name of the lead"}
    yield from rules
    kinds = {f"odrl:{kind.lower()}": f"odrl:{kind}" for kind in ("Permission", "Prohibition")}
    own = {kind: [ref(each["@id"]) for each in rules if each["@type"] == of] for kind, of in kinds.items()}
    yield {**policy, "@type": "odrl:Agreement", "odrl:uid": policy, **own}


def as_turtle(case: Case, entries: Sequence[RecordEntry]) -> str:
    """Return dataset.ttl."""
    from rdflib import Graph

    graph = Graph().parse(data=_written(_dataset(case, entries)), format="json-ld")
    return graph.serialize(format="turtle")


def _dataset(case: Case, entries: Sequence[RecordEntry]) -> Iterator[Node]:
    said = {entry.key: entry for entry in entries}
    contact, point, publisher, body, source, form, variables = (
        name_of(case, what)
        for what in ("contact", "point", "publisher", "hdab", "provenance", "distribution", "variables")
    )
    category, kind = (f"{NOWHERE}{what}" for what in ("health-category", "type"))
    columns = list(getattr(case.plan.task, "input_names", ()))
    law = [ref(f"{LAW}2025/327/oj"), ref(f"{LAW}2016/679/oj")]  # European Health Data Space; GDPR
    counts = {"numberOfRecords": case.counted("cases"), "numberOfUniqueIndividuals": case.counted("patients")}
    yield {
        "@id": name_of(case, "dataset"),
        "@type": "dcat:Dataset",
        "dct:title": f"Data of {case.site or 'a hospital'} for {type(case.plan.task).title}",
        "dct:description": [*said["subjects"].says, *said["data"].says],
        "dct:identifier": name_of(case, "dataset"),
        "dct:accessRights": ref(f"{EU}access-right/NON_PUBLIC"),
        "dct:type": ref(f"{KINDS}/SYNTHETIC_DATA" if case.synthetic else kind),
        "dcatap:applicableLegislation": law,
        "dcat:theme": ref(f"{EU}data-theme/HEAL"),
        "dcat:keyword": [case.plan.task.name, case.plan.task.goal.metric],
        "dcat:contactPoint": ref(contact),
        "dcat:distribution": ref(form),
        "dct:publisher": ref(publisher),
        "dct:provenance": ref(source),
        "healthdcatap:hdab": ref(body),
        "healthdcatap:healthCategory": ref(category),
        "healthdcatap:hasStructuredData": bool(columns),
        **({"healthdcatap:hasVariables": ref(variables)} if columns else {}),
        "dpv:hasPurpose": ref(name_of(case, "purpose")),
        "rdfs:comment": f"{BLANK}legal basis; population; retention",
        **{
            f"healthdcatap:{what}": {"@value": str(count), "@type": "xsd:nonNegativeInteger"}
            for what, count in counts.items()
            if count is not None
        },
    }
    if columns:
        yield from _variables(variables, columns)
    for concept, scheme in ((category, CATEGORIES), *(() if case.synthetic else ((kind, KINDS),))):
        yield {"@id": concept, "@type": "skos:Concept", "skos:note": f"{BLANK}one of {scheme}"}
    blank = {"rdfs:comment": f"{BLANK}name and address"}
    yield {"@id": contact, "@type": "vcard:Kind", "vcard:hasEmail": ref(f"{NOWHERE}email"), **blank}
    yield {"@id": point, "@type": "cv:ContactPoint", "cv:contactPage": ref(f"{NOWHERE}page"), **blank}
    reached = {"cv:contactPoint": ref(point), "dcat:contactPoint": ref(contact)}  # of releases 8 and 5
    for agent, who in ((publisher, case.site or f"{BLANK}the hospital"), (body, f"{BLANK}health data access body")):
        yield {"@id": agent, "@type": "foaf:Agent", "foaf:name": who, **reached}
    from_where = f"{BLANK}systems that the data come from"
    yield {"@id": source, "@type": "dct:ProvenanceStatement", "rdfs:label": from_where}
    url = {"dcat:accessURL": ref(f"{NOWHERE}access"), "dct:description": "The data do not leave the hospital."}
    yield {"@id": form, "@type": "dcat:Distribution", "dcatap:applicableLegislation": law, **url}
    yield {"@id": name_of(case, "purpose"), "@type": "dpv:ResearchAndDevelopment"}


def _variables(name: str, columns: Sequence[str]) -> Iterator[Node]:
    """Yield the numbers that a network reads of a case, as the columns of a table."""
    table = f"{name}:table"
    told = {"csvw:datatype": "number", "dct:description": "A number that a network reads of each case."}
    own = [{"@id": f"{table}:{place}", **dict.fromkeys(NAMED, one)} for place, one in enumerate(columns)]
    yield {"@id": name, "@type": "csvw:TableGroup", "dct:title": "Variables", "csvw:table": ref(table)}
    yield {"@id": table, "@type": "csvw:Table", "dct:title": "Cases", "csvw:column": [ref(one["@id"]) for one in own]}
    yield from ({**one, "@type": "csvw:Column", **told} for one in own)


def _written(nodes: Iterable[Node]) -> str:
    document = {"@context": dict(table("prefixes.csv")), "@graph": list(nodes)}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"
