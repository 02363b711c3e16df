"""What stands between a client and transformers' server: who may ask, for what, how much and how long; and what is kept."""
