package rdma

import (
	"testing"
	"time"

	"github.com/headrace/headrace/transfer"
	"github.com/headrace/headrace/transfer/telemetry"
	"github.com/headrace/headrace/transfer/transporttest"
)

// An observer is told of every lane, by its queue pairs and its rail.
func TestLanesAreMeasured(t *testing.T) {
	needDevice(t)
	checkObjects(t)
	transporttest.Measured(t, factory(), func(t *testing.T, f transfer.Flow) {
		q := f.Queue
		if f.Transport == "tcp" {
			return // the spare's
		}
		if q == nil || q.Device == "" || q.Port == 0 || q.Netdev == "" || q.Num == 0 || q.PeerNum == 0 || !q.PeerPort.IsValid() {
			t.Errorf("%+v", f)
		}
	})
}

// With telemetry, posts of real lanes are timed, and the rail's counters read.
func TestPostsOfLanesAreTimed(t *testing.T) {
	needDevice(t)
	checkObjects(t)
	e := EntryPoints()
	tel, err := telemetry.New(telemetry.Config{Mode: telemetry.EBPF, Posts: telemetry.Posts{Post: e.Post, Poll: e.Poll}})
	if err != nil {
		t.Skip(err) // in the lab that is a failure
	}
	defer func() {
		if err := tel.Close(); err != nil {
			t.Error(err)
		}
	}()
	p := transporttest.NewPair(t, factory(), transporttest.Options{Config: func(c *transfer.Config) {
		patient(c)
		c.Observer = tel
	}})
	r := transporttest.NewRand()
	const requestsMax = 100 // one post in 32 is timed
	for i := 0; i < requestsMax && tel.Status().Posts.Count < 3; i++ {
		q := p.NewRequest(r, 500, 0, time.Minute)
		q.Present(t, nil)
		q.Bind(t)
		q.PushAll(t, nil)
		q.Settled(t, nil)
	}
	s := tel.Status()
	t.Logf("%+v", s.Posts)
	if len(s.Rails) == 0 || s.Rails[0].Counters["sent_pkts"] == 0 {
		t.Errorf("%+v", s.Rails)
	}
	if s.Posts.Count == 0 || s.Posts.MeanMicros <= 0 {
		t.Errorf("no post was timed: %+v", s.Posts)
	}
	p.Close(t)
	if after := tel.Status().Posts; after.Count < s.Posts.Count {
		t.Errorf("%d posts were timed, and with the lanes gone %d", s.Posts.Count, after.Count)
	}
}
