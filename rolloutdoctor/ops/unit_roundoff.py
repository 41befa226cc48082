"""Unit roundoffs of the formats that trainers compute in."""

DOUBLE, SINGLE, HALF, BFLOAT16 = 2.0**-53, 2.0**-24, 2.0**-11, 2.0**-8
"""Unit roundoff of float64, float32, float16 and bfloat16: half of the spacing at one."""
