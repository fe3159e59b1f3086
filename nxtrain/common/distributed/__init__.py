"""Communication between ranks: collectives, rendezvous, heartbeats, failures."""
