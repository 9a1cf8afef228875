"""One thread for every test: the models are small, and two cores may be shared."""
import torch

torch.set_num_threads(1)
