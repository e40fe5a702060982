"""The exercises, one file per template: what is run, what must come out, what each mistake is called."""
