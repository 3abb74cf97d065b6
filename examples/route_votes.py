"""Three routers on five votes
===========================

Five children vote, two parents listen, and four votes agree on parent 0. Which router finds out?

Dot-product agreement also counts how long a vote is, and the long votes here are for parent 1; the cosine and the
Gaussians of EM ask only how well votes agree.
"""

import torch

from torchcaps import EM, Capsules, Dynamic, route

torch.manual_seed(0)
children = Capsules(pose=torch.randn(1, 5, 4), activation=torch.ones(1, 5))  # [b i d]
weights = torch.randn(5, 2, 4, 4)  # [i j k d]

# Let the first four children vote for the same pose of parent 0.
agreed = torch.tensor([1.0, -1.0, 0.5, 0.0])
for i in range(4):
    x = children.pose[0, i]
    weights[i, 0] = torch.outer(agreed, x) / (x @ x)

# %%
# With `trace=True` the record has the coupling of every iteration. The fifth child agrees with nobody.

routers = {"dynamic, dot product": Dynamic(), "dynamic, cosine": Dynamic(agreement="cosine"), "EM": EM()}
for name, method in routers.items():
    parents, info = route(children, weights, method, trace=True)
    print(f"{name}: activation of the parents {[round(a, 3) for a in parents.activation[0].tolist()]}")
    for t, coupling in enumerate(info.coupling[:, 0]):  # [i j]
        print(f"  iteration {t + 1}: share of parent 0  {[round(c, 2) for c in coupling[:, 0].tolist()]}")
