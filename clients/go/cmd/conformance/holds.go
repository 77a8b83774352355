package main

import (
	"context"
	"fmt"
	"time"

	"distributed-counter.example/clients/go/counter"
)

// hold runs the commands of holds.
func (c command) hold(ctx context.Context, client *counter.Client, opts []counter.Option) (outcome, error) {
	switch c.Do {
	case "release":
		released, err := client.ReleaseHold(ctx, c.Hold)
		return sums(released), err
	case "get_hold":
		found, err := client.GetHold(ctx, c.Hold)
		return heldOf(found), err
	case "holds":
		found, err := all(ctx, client.Holds(c.Counter))
		shown := []outcome{}
		for _, each := range found {
			shown = append(shown, heldOf(each))
		}
		return outcome{"holds": shown}, err
	case "extend":
		lasts, err := duration(c.ExpiresIn)
		if err != nil {
			return nil, err
		}
		found, err := client.ExtendHold(ctx, c.Hold, lasts)
		return heldOf(found), err
	}
	one, err := item{c.Counter, c.Amount, c.AtLeast, c.AtMost}.read()
	if err != nil {
		return nil, err
	}
	if c.Do == "settle" {
		settled, err := client.SettleHold(ctx, c.Hold, one.Delta)
		found := sums(settled)
		found["settled"], found["over"] = fmt.Sprint(settled.Settled), settled.Over
		return found, err
	}
	lasts, err := duration(c.ExpiresIn)
	if err != nil {
		return nil, err
	}
	hold, err := client.Hold(ctx, c.Counter, one.Delta, lasts, append(opts, boundsOf(one)...)...)
	if err != nil {
		return nil, err
	}
	found := sums(hold.Began)
	found["hold"], found["amount"] = hold.ID(), fmt.Sprint(hold.Began.Amount)
	return found, nil
}

func sums(found counter.HoldCount) outcome {
	return outcome{"count": fmt.Sprint(found.Count), "held": fmt.Sprint(found.Held)}
}

func heldOf(found counter.HoldState) outcome {
	shown := outcome{"hold": found.ID, "amount": fmt.Sprint(found.Amount), "state": found.State, "over": found.Over}
	if found.State == "settled" {
		shown["settled"] = fmt.Sprint(found.Settled)
	}
	if found.State == "open" {
		shown["expires_at"] = found.ExpiresAt.Format(timeLayout)
	} else {
		shown["ended_at"] = found.EndedAt.Format(timeLayout)
	}
	return shown
}

// duration reads what the package takes as a time.Duration.
func duration(text string) (time.Duration, error) {
	found, err := time.ParseDuration(text)
	if err != nil {
		return 0, &counter.RefusedError{Code: "invalid_parameter", Detail: err.Error()}
	}
	return found, nil
}
