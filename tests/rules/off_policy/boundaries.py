"""Numbers of the rules of this family: rows just below each, and just above."""

from rules.row_boundaries import RowBoundary

BOUNDARIES: list[RowBoundary] = []
