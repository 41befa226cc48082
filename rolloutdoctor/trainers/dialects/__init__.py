"""Configurations of programs that run another program's trainer, as options of that trainer."""
