"""A package that adds a rule, a trainer and an importer."""
