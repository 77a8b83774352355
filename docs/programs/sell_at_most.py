"""Sell 100 tickets to 300 buyers at once, over a network that loses every fifth answer."""

from __future__ import annotations

import asyncio

from lost_answers import Bounded, Way, together, with_each_way

TICKETS = 100
BUYERS = 300


async def sell(way: Way) -> None:
    """Let all buyers buy; print what they were answered, and what is left."""

    async def buy(order: int) -> int:
        return int(await way.add(-1, f"order-{order}"))

    sold = await together(buy(order) for order in range(BUYERS))
    left = await way.count()
    print(f"{way.name:<34}{way.network.lost:>12}{sold:>6}{left:>6}{TICKETS - sold - left:>10}")


print(f"{'':<34}{'lost answers':>12}{'sold':>6}{'left':>6}{'vanished':>10}")
tickets = Bounded(start=TICKETS, least=0, most=TICKETS, settings={}, bounds={"at_least": 0})
asyncio.run(with_each_way(tickets, sell))
