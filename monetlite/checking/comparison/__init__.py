"""The same model trained by monetlite and by what people use today, on the same machine, in one run."""
