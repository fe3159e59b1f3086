"""Model families for nxtrain, each registered by an entry point in the group `nxtrain.models`."""
