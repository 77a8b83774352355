// Adds 2 with a token, sends the same add again, and prints the count.
package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"time"

	openapi "counter.example/openapi"
)

func main() {
	ctx := context.Background()
	settings := openapi.NewConfiguration()
	settings.Servers = openapi.ServerConfigurations{{URL: os.Args[1]}}
	counters := openapi.NewAPIClient(settings).CountersAPI
	nonce := make([]byte, 16)
	_, err := rand.Read(nonce)
	check(err)
	body := openapi.NewAddBody(2)
	body.SetIdempotencyToken(*openapi.NewTokenBody(hex.EncodeToString(nonce), time.Now().UTC().Truncate(time.Microsecond)))
	for range 2 {
		added, _, err := counters.AddToCounter(ctx, "default", "openapi-generator").AddBody(*body).Execute()
		check(err)
		fmt.Println("replayed", added.GetReplayed())
	}
	read, _, err := counters.GetCounter(ctx, "default", "openapi-generator").MaxStaleness("0s").Execute()
	check(err)
	fmt.Println("count", read.Count)
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
