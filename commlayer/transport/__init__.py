"""Ways of moving bytes between ranks: the contract, Gloo, shared memory, NCCL."""
