"""Pictures, each drawn from a record that a command writes; one module per kind of record."""
