package pairing

import (
	"fmt"
	"math"
	"time"
)

// Channel is what the prefill worker's daemon measured of its channel to the decode worker's, a moment ago.
type Channel struct {
	SpeedBps     float64 // of sending while there was something to send; 0: not measured yet
	BacklogBytes float64 // pushed and not yet landed
	RTT          time.Duration
	AgainShare   float64 // of the packets lately sent: 0.01 for one in a hundred that had to be sent again
	TokenBytes   float64 // of KV cache of the prefill worker; 0: not known
}

const (
	// prefillRate turns the time of a transfer into tokens, which the other costs are counted in: what a worker could have
	// prefilled meanwhile, in tokens a second.
	prefillRate = 4096
	// againWeight makes packets that are sent again count before they have slowed the channel down: RoCE sends everything
	// behind a lost packet again, and TCP halves its window.
	againWeight = 10
	speedLeft   = 0.05 // of a channel that loses everything: dear, and not impossible
	// costStep is what costs are rounded down to: speeds that differ by little must not decide alone.
	costStep = 64
)

// transfer is how long a prompt's KV cache will take over the channel, as far as that is known.
func (c *Channel) transfer(promptTokens int64) time.Duration {
	seconds := c.RTT.Seconds()
	if c.SpeedBps > 0 {
		left := max(1-againWeight*max(c.AgainShare, 0), speedLeft)
		seconds += (c.BacklogBytes + float64(promptTokens)*c.TokenBytes) / (c.SpeedBps * left)
	}
	return time.Duration(min(seconds, math.MaxInt32) * float64(time.Second))
}

// cost is transfer in tokens.
func (c *Channel) cost(promptTokens int64) int64 {
	return int64(c.transfer(promptTokens).Seconds()*prefillRate) / costStep * costStep
}

func (c *Channel) words(promptTokens int64) string {
	return fmt.Sprintf("transfer %v (%.0f MB/s, %.0f MB waiting, round trip %v, %.2g %% sent again)", c.transfer(promptTokens).Round(time.Millisecond), c.SpeedBps/1e6,
		c.BacklogBytes/1e6, c.RTT.Round(time.Microsecond), 100*c.AgainShare)
}

// channel gives what is known of the way between two workers; what is not known costs nothing, and so is tried.
func (v *View) channel(p, d *Candidate) (Channel, bool) {
	if v.Channel == nil {
		return Channel{}, false
	}
	return v.Channel(p.Worker, d.Worker)
}
