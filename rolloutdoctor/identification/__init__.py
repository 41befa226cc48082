"""Which objective made the logged numbers: audits over a product of options, pruned stage by stage."""
