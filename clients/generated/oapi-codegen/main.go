// Adds 2 with a token, sends the same add again, and prints the count.
package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/google/uuid"

	"counter.example/generated/counterapi"
)

func main() {
	ctx := context.Background()
	client, err := counterapi.NewClientWithResponses(os.Args[1])
	check(err)
	token := counterapi.TokenBody{Token: uuid.NewString(), GenerationTime: time.Now().UTC().Truncate(time.Microsecond)}
	body := counterapi.AddBody{Delta: 2, IdempotencyToken: &token}
	for range 2 {
		added, err := client.AddToCounterWithResponse(ctx, "default", "oapi-codegen", nil, body)
		check(err)
		fmt.Println("replayed", *added.JSON200.Replayed)
	}
	now := "0s"
	read, err := client.GetCounterWithResponse(ctx, "default", "oapi-codegen", &counterapi.GetCounterParams{MaxStaleness: &now})
	check(err)
	fmt.Println("count", read.JSON200.Count)
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
