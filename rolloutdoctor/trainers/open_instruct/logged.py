"""What objective and metrics of open-instruct have in common: its KL estimators, and names of metrics."""

KL_BOUND = 40.0
"""Largest absolute log-ratio to the reference."""
ESTIMATORS = (("k1", False), ("k2", False), ("k3", False), ("k1", True))
"""`kl_estimator` to an estimator, and whether the importance ratio multiplies it."""
REFERENCE_METRICS = tuple(f"objective/kl{place}_avg" for place in range(len(ESTIMATORS)))
BY_PACK = ("loss/total_avg", "val/ratio_var")
"""Metrics that depend on how the responses were packed."""
RHO_BY_RANK = ("val/rho_weight", "val/rho_clipfrac")
"""Metrics of the weights that are plain means over ranks."""
RHO_DROPS = ("val/rho_drop_frac", "val/rho_drop_low_frac", "val/rho_drop_high_frac")
