"""Communication between ranks: collectives, rendezvous, heartbeats, and reports of failures."""
