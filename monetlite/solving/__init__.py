"""From a profile and a budget to a schedule, with a bound on how much faster any could be. No torch."""
