"""From a model to a schedule: trace, profile and solve in one; for many budgets; for the largest batch."""
