"""A model that does as the prompt says: it answers, takes too long, or fails. It bills each call.

A call that is sent again gets the answer that it got before, and is billed once.
"""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel


class Prompt(BaseModel):
    """What a call shall do. The bill has the hold that it was made under."""

    team: str
    hold: str
    cost: int
    takes_s: float = 0.0
    fails: bool = False


app = FastAPI()
answered: dict[str, int] = {}
billed: dict[str, tuple[str, int]] = {}
stopped: set[str] = set()


@app.post("/calls/{call}")
async def answer(call: str, prompt: Prompt) -> dict[str, int]:
    """Return what the call has cost."""
    if call not in answered:
        await asyncio.sleep(prompt.takes_s)
        if prompt.fails or prompt.hold in stopped:
            raise HTTPException(500)
        if call not in answered:
            answered[call] = prompt.cost
            billed[prompt.hold] = prompt.team, prompt.cost
    return {"cost": answered[call]}


@app.post("/holds/{hold}/stop")
async def stop(hold: str) -> dict[str, int]:
    """Stop the call that was made under a hold; return what it has cost, which is final."""
    stopped.add(hold)
    _, cost = billed.get(hold, ("", 0))
    return {"cost": cost}


@app.get("/bill")
async def bill() -> dict[str, tuple[str, int]]:
    """Return team and cost of each call, by its hold."""
    return billed
