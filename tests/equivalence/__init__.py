"""Training under EPL against plain single-device training."""
