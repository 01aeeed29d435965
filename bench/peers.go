package bench

import (
	"context"
)

type peer struct {
	name, what string
}

func (s *session) startPeers(ctx context.Context, t string) error   { return nil }
func (s *session) stopPeers()                                       {}
func (s *session) verifyPeer(p *peer, block int) error              { return nil }
func (p *peer) move(block, batch int, bytes int64) (Measure, error) { return Measure{}, nil }
func (p *peer) latency(block, count int) ([]float64, error)         { return nil, nil }
