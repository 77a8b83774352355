"""Add 2 with a token, send the same add again, and print the count."""

import sys
import uuid
from datetime import UTC, datetime

from generated import Client
from generated.api.counters import add_to_counter, get_counter
from generated.models import AddAnswer, AddBody, CountAnswer, TokenBody

client = Client(base_url=sys.argv[1])
token = TokenBody(token=str(uuid.uuid4()), generation_time=datetime.now(UTC))
body = AddBody(delta=2, idempotency_token=token)
counter = "openapi-python-client"
for _ in range(2):
    added = add_to_counter.sync("default", counter, client=client, body=body)
    print("replayed", added.replayed if isinstance(added, AddAnswer) else added)
read = get_counter.sync("default", counter, client=client, max_staleness="0s")
print("count", read.count if isinstance(read, CountAnswer) else read)
