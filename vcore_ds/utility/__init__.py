"""The probe direction and every token's utility along it, on a model that stays sharded."""
