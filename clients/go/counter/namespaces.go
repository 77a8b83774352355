package counter

import (
	"context"
	"encoding/json"
	"net/http"
)

// Settings are those of a namespace by name, as docs/http.md describes them and as the service writes
// them, with its name as namespace. Durations are text such as 10s.
type Settings map[string]any

// Namespaces returns the namespaces that the caller may see, with their settings.
func (c *Client) Namespaces(ctx context.Context) ([]Settings, error) {
	var found []Settings
	err := c.many(ctx, "namespaces", "/v1/namespaces", func(o *object) {
		found, _ = listOf(o, "namespaces", settingsOf)
	})
	return found, err
}

// Namespace returns the settings of this client's namespace.
func (c *Client) Namespace(ctx context.Context) (Settings, error) {
	return c.settings(ctx, &call{method: http.MethodGet})
}

// CreateNamespace creates this client's namespace; the setting counter_type is the least that it
// needs. It returns a [RefusedError] with the code precondition_failed if the namespace exists. The
// answer has warnings only if there are any.
func (c *Client) CreateNamespace(ctx context.Context, settings Settings) (Settings, error) {
	return c.put(ctx, settings, "If-None-Match")
}

// ChangeNamespace changes the given settings of this client's namespace. It creates none.
func (c *Client) ChangeNamespace(ctx context.Context, settings Settings) (Settings, error) {
	return c.put(ctx, settings, "If-Match")
}

// DeleteNamespace deletes this client's namespace permanently, with its counters, events and tokens.
func (c *Client) DeleteNamespace(ctx context.Context) error {
	return c.do(ctx, &call{
		method: http.MethodDelete, path: c.path, operation: "namespace", isEmpty: true,
	})
}

func (c *Client) put(ctx context.Context, settings Settings, precondition string) (Settings, error) {
	body, err := json.Marshal(settings)
	if err != nil {
		return nil, invalid("the settings cannot be written as JSON: %v", err)
	}
	return c.settings(ctx, &call{method: http.MethodPut, body: body, precondition: precondition})
}

func (c *Client) settings(ctx context.Context, call *call) (Settings, error) {
	var found Settings
	call.path, call.operation = c.path, "namespace"
	call.read = func(text []byte) (err error) {
		if found, err = settingsOf(text); err == nil {
			o := objectOf(text)
			o.must(o.text("namespace") == c.namespace, "it is about another namespace")
			err = o.err
		}
		return err
	}
	if err := c.do(ctx, call); err != nil {
		return nil, err
	}
	return found, nil
}

func settingsOf(text []byte) (Settings, error) {
	o := objectOf(text)
	o.text("namespace")
	o.text("counter_type")
	var found Settings
	if o.err == nil {
		o.err = json.Unmarshal(text, &found)
	}
	return found, o.err
}
