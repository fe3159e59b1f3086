"""Model families for nxtrain; each is found through its entry point in the group `nxtrain.models`."""
