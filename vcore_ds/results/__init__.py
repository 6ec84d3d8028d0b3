"""What is made of finished runs: reading them, tables, statistics, model cards."""
