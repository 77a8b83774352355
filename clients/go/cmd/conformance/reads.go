package main

import (
	"context"
	"errors"
	"fmt"
	"math/big"
	"time"

	"distributed-counter.example/clients/go/counter"
)

const timeLayout = "2006-01-02T15:04:05.000000Z"

// read runs the commands that take no credential.
func (c command) read(ctx context.Context, client *counter.Client) (outcome, error) {
	opts, err := c.options()
	if err != nil {
		return nil, err
	}
	switch c.Do {
	case "get":
		count, err := client.Get(ctx, c.Counter, opts...)
		if err != nil {
			return nil, err
		}
		found := outcome{"count": count.Count.String(), "accuracy": count.Accuracy}
		for name, held := range map[string]*big.Int{"held": count.Held, "held_down": count.HeldDown} {
			if held.Sign() != 0 {
				found[name] = held.String()
			}
		}
		return found, nil
	case "get_many":
		counts, err := client.GetMany(ctx, c.Counters, opts...)
		return outcome{"counts": shownCounts(counts)}, err
	case "names":
		names, err := all(ctx, client.Names(c.Prefix, opts...))
		return outcome{"counters": names}, err
	case "list":
		if c.Order == "-count" {
			opts = append(opts, counter.LargestFirst())
		}
		counts, err := all(ctx, client.Counts(c.Prefix, opts...))
		return outcome{"counts": shownCounts(counts)}, err
	case "sum":
		sum, err := client.Sum(ctx, c.Prefix, opts...)
		return outcome{"sum": fmt.Sprint(sum.Sum), "counters": sum.Counters}, err
	case "between", "history", "events":
		return c.lookBack(ctx, client, opts)
	case "live":
		return c.live(ctx, client)
	case "busiest":
		return c.busiest(ctx, client)
	case "recount":
		windows, err := client.Recount(ctx, c.Counter)
		return outcome{"windows": windows}, err
	case "tokens":
		tokens, err := client.Tokens(ctx, c.Number)
		return outcome{"tokens": len(tokens)}, err
	}
	return c.manage(ctx, client)
}

func (c command) options() ([]counter.Option, error) {
	var opts []counter.Option
	if c.MaxStaleness != nil {
		age, err := time.ParseDuration(*c.MaxStaleness)
		if err != nil {
			return nil, err
		}
		opts = append(opts, counter.MaxStaleness(age))
	}
	if c.Limit != nil {
		opts = append(opts, counter.Limit(*c.Limit))
	}
	return opts, nil
}

func all[T any](ctx context.Context, pages *counter.Pages[T]) ([]T, error) {
	items := []T{}
	for pages.Next(ctx) {
		items = append(items, pages.Item())
	}
	return items, pages.Err()
}

func shownCounts(counts []counter.Count) []outcome {
	found := []outcome{}
	for _, each := range counts {
		found = append(found, outcome{"counter": each.Counter, "count": each.Count.String(), "accuracy": each.Accuracy})
	}
	return found
}

func (c command) lookBack(ctx context.Context, client *counter.Client, opts []counter.Option) (outcome, error) {
	from, err := moment(c.From)
	if err != nil {
		return nil, err
	}
	to, err := moment(c.To)
	if err != nil {
		return nil, err
	}
	span := counter.Span{From: from, To: to, TZ: c.TZ}
	switch c.Do {
	case "between":
		change, err := client.Between(ctx, c.Counter, span)
		return outcome{"count": fmt.Sprint(change.Count), "delta": fmt.Sprint(change.Delta)}, err
	case "history":
		points, err := client.History(ctx, c.Counter, span, c.Step)
		found := []outcome{}
		for _, each := range points {
			found = append(found, outcome{"time": each.Time.Format(timeLayout),
				"count": each.Count.String(), "delta": each.Delta.String()})
		}
		return outcome{"points": found}, err
	}
	events, err := all(ctx, client.Events(c.Counter, span, opts...))
	found := []outcome{}
	for _, each := range events {
		found = append(found, eventOf(each))
	}
	return outcome{"events": found}, err
}

func eventOf(event counter.Event) outcome {
	found := outcome{"event_time": event.Time.Format(timeLayout), "event_id": event.ID,
		"event_item_key": event.ItemKey, "delta": fmt.Sprint(event.Delta), "clear": event.Clear}
	found.bounds(event.AtLeast, event.AtMost)
	if why := event.Refused; why != nil {
		refused := outcome{"delta": fmt.Sprint(why.Delta), "count": why.Count.String()}
		refused.bounds(why.AtLeast, why.AtMost)
		found["refused"] = refused
	}
	return found
}

// moment reads a time. One without an offset cannot be given to the client at all.
func moment(text string) (counter.Moment, error) {
	switch text {
	case "":
		return counter.Moment{}, nil
	case "today":
		return counter.Today(), nil
	}
	found, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return counter.Moment{}, &counter.RefusedError{Code: "invalid_parameter", Detail: err.Error()}
	}
	return counter.At(found), nil
}

// live returns the first count that the command waits for.
func (c command) live(ctx context.Context, client *counter.Client) (outcome, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	count := ""
	err := client.Live(ctx, c.Counter, func(found counter.Count, err error) {
		if err == nil && found.Count.String() == c.Until {
			count = c.Until
			cancel()
		}
	})
	if count != "" {
		return outcome{"count": count}, nil
	}
	return nil, err
}

func (c command) busiest(ctx context.Context, client *counter.Client) (outcome, error) {
	limit, span := 10, 10*time.Second
	if c.Limit != nil {
		limit = *c.Limit
	}
	if c.Span != "" {
		var err error
		if span, err = time.ParseDuration(c.Span); err != nil {
			return nil, err
		}
	}
	busiest, err := client.Busiest(ctx, limit, span)
	found := []outcome{}
	for _, each := range busiest.Counters {
		found = append(found, outcome{"counter": each.Counter, "count": each.Count.String()})
	}
	return outcome{"counters": found}, err
}

func (c command) manage(ctx context.Context, client *counter.Client) (outcome, error) {
	var settings counter.Settings
	var err error
	switch c.Do {
	case "namespaces":
		found, err := client.Namespaces(ctx)
		names := []any{}
		for _, each := range found {
			names = append(names, each["namespace"])
		}
		return outcome{"namespaces": names}, err
	case "delete_namespace":
		return outcome{}, client.DeleteNamespace(ctx)
	case "namespace":
		settings, err = client.Namespace(ctx)
	case "create_namespace":
		settings, err = client.CreateNamespace(ctx, c.Settings)
	case "change_namespace":
		settings, err = client.ChangeNamespace(ctx, c.Settings)
	default:
		return nil, fmt.Errorf("no command is called %q", c.Do)
	}
	return outcome{"counter_type": settings["counter_type"]}, err
}

// buffer adds the items through a buffer, and returns what is not counted for sure.
func (c command) buffer(ctx context.Context, client *counter.Client) (outcome, error) {
	items, err := c.items()
	if err != nil {
		return nil, err
	}
	// It flushes nothing by itself before this.
	buffer, err := client.Buffer(counter.BufferConfig{MaxDelay: time.Minute})
	if err != nil {
		return nil, err
	}
	for _, each := range items {
		if err := buffer.Add(each.Counter, each.Delta); err != nil {
			buffer.Close(ctx)
			return nil, err
		}
	}
	var unsure *counter.BufferError
	if err := buffer.Close(ctx); err != nil && !errors.As(err, &unsure) {
		return nil, err
	}
	failed := []outcome{}
	if unsure != nil {
		for _, each := range unsure.Failed {
			end := outcomeOf(each.Err)
			end["counter"], end["delta"] = each.Counter, fmt.Sprint(each.Delta)
			failed = append(failed, end)
		}
	}
	return outcome{"failed": failed}, nil
}
