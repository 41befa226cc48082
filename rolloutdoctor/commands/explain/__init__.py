"""The reference pages as commands: rules, causes, fixes, trainers, metrics, schemas."""
