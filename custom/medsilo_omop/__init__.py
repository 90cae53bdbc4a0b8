"""Extracts of the OMOP common data model, as tables with a line per person: by codes, without free text."""
