"""Preparation of token stores from raw data: reading, curation, sampling, tokenization. No collectives."""
