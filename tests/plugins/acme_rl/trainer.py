"""Acme's trainer, a fork of TRL with other defaults."""

from dataclasses import replace

from rolloutdoctor.trainers.trl.grpo import TRAINER as TRL

TRAINER = replace(TRL, name="acme", title="Acme RL")
