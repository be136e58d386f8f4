"""How one model's attention is made of another's: fitted, judged and kept as the artifact of a pair."""
