package nodeclient

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/node/wire"
)

// Extend (P) appends blocks to those of Present, as an engine that computes in chunks takes them.
func (c *Client) Extend(ctx context.Context, id transfer.LeaseID, blocks []uint32) error {
	_, err := c.value(ctx, "extend lease", wire.Extend{Lease: uint64(id), Blocks: blocks})
	return err
}

// Join makes this connection that of a rank of an engine, whose own connection may be another process's and may come later:
// it lends memory and pushes for the engine's leases, and hears what it pushed land. To be called before it lends.
func (c *Client) Join(ctx context.Context, engineID string) error {
	_, err := c.value(ctx, "join engine", wire.Join{EngineID: engineID})
	return err
}

// Describe says of the engine what others may want to know, as a JSON object: the daemon shows it in its status.
func (c *Client) Describe(ctx context.Context, about any) error {
	doc, err := json.Marshal(about)
	if err != nil {
		return fmt.Errorf("describe engine: %w", err)
	}
	_, err = c.value(ctx, "describe engine", wire.Describe{JSON: doc})
	return err
}
