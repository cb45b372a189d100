"""Plans for people who train without monetlite, in the space that their tools can express."""
