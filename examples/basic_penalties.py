"""Every penalty is a plain function of tensors: three regressions, with and without one."""

import torch
from torch import Tensor, nn

import equipoise as eq


def fitted(penalty: str) -> Tensor:
    """Twelve coefficients, of which three are at work, from thirty noisy samples."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 12, generator=generator)
    truth = torch.tensor([2.0, -1.0, 0.5] + [0.0] * 9)
    y = x @ truth + 0.5 * torch.randn(30, generator=generator)
    model = nn.Linear(12, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(300):
        loss = (model(x).squeeze(1) - y).square().mean()
        if penalty == "l1":
            loss = loss + 0.3 * eq.l1(model.weight)
        elif penalty == "l2":
            loss = loss + 0.3 * eq.l2(model.weight)
        elif penalty == "elastic_net":
            loss = loss + 0.3 * eq.elastic_net(model.weight, l1_ratio=0.5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.weight.detach().squeeze(0)


def main() -> None:
    """Fit with each penalty, and see what it does to the coefficients."""
    print("penalty       first three           largest of the others   their sum of sizes")
    for penalty in ("none", "l1", "l2", "elastic_net"):
        weight = fitted(penalty)
        first = "  ".join(f"{w:5.2f}" for w in weight[:3].tolist())
        rest = weight[3:].abs()
        print(f"{penalty:<12}  {first}  {rest.max():14.2f}  {rest.sum():21.2f}")

    x = torch.tensor([0.5, -2.0, 0.0], requires_grad=True)
    value = eq.l1(x)
    value.backward()
    print(f"\nl1 of {x.tolist()} is {value.item()}; its gradient is {x.grad.tolist()}, 0 at 0.")
    try:
        eq.l1(x, reduction="avg")
    except eq.OptionError as error:
        print(error)


if __name__ == "__main__":
    main()
