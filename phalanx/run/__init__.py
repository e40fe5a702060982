"""A run from its settings to its result: the one conductor, the trainers, and the job that each rank executes.

Two halves meet here. The parent's (`preflight`, `conductor`, `spec`, `start`, `record`, `stored`, `resume`, `result`,
`facts`, `script_settings`) imports no torch: commands load it at once. A rank's (`job`, `trainer`, `auto_strategy`,
`weights`, `export`, `rate_finder`) trains. A trainer is in both: it loads `start`, which launches ranks, only to do so.
"""
