package registry

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
)

// leadPrefix is outside of what tables read: elections and what leaders keep are nobody's entries.
const leadPrefix = "/headrace/lead/v1/"

// ErrNotLeading is the answer to who leads no longer.
var ErrNotLeading = errors.New("another leads now")

// Leadership is one process's turn to be the only one of a scope. It ends when etcd has not heard of the process for the registry's TTL,
// or with Resign.
type Leadership struct {
	r        *Registry
	scope    string
	session  *concurrency.Session
	election *concurrency.Election
}

// Scope names a folder of elections: parts may have any characters.
func Scope(parts ...string) string {
	s := ""
	for i, p := range parts {
		if i > 0 {
			s += "/"
		}
		s += url.PathEscape(p) + "."
	}
	return s
}

// Lead waits until this process, called id, is the leader of scope. One at a time is, in the order in which they came.
func (r *Registry) Lead(ctx context.Context, scope, id string) (*Leadership, error) {
	// The session must outlive ctx, which bounds the waiting alone.
	sctx, cancel := context.WithCancel(r.ctx)
	stop := context.AfterFunc(ctx, cancel)
	session, err := concurrency.NewSession(r.cli, concurrency.WithTTL(int(r.ttl/time.Second)), concurrency.WithContext(sctx))
	if err != nil {
		cancel()
		return nil, fmt.Errorf("stand for leader of %s: %w", scope, err)
	}
	l := &Leadership{r: r, scope: scope, session: session, election: concurrency.NewElection(session, leadPrefix+scope+"/by")}
	// A session that is lost while others lead must not wait for ever for a key that is gone.
	wait, done := context.WithCancel(ctx)
	defer done()
	lost := make(chan struct{})
	go func() {
		defer close(lost)
		select {
		case <-session.Done():
			done()
		case <-wait.Done():
		}
	}()
	err = l.election.Campaign(wait, id)
	done()
	<-lost
	if !stop() || err != nil {
		cancel()
		return nil, errors.Join(fmt.Errorf("stand for leader of %s: %w", scope, errors.Join(err, ctx.Err())), l.Resign())
	}
	return l, nil
}

// Lost is closed when this process may not be the leader any more.
func (l *Leadership) Lost() <-chan struct{} { return l.session.Done() }

func (l *Leadership) stateKey() string { return leadPrefix + l.scope + "/state" }

// Get reads what the leaders of this scope have kept; nil is nothing.
func (l *Leadership) Get(ctx context.Context) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	resp, err := l.r.cli.Get(ctx, l.stateKey())
	if err != nil {
		return nil, fmt.Errorf("read state of %s: %w", l.scope, err)
	}
	if len(resp.Kvs) == 0 {
		return nil, nil
	}
	return resp.Kvs[0].Value, nil
}

// Put keeps a value for the next leader; nil deletes it. ErrNotLeading if another leads: then nothing is changed.
func (l *Leadership) Put(ctx context.Context, value []byte) error {
	op := clientv3.OpDelete(l.stateKey())
	if value != nil {
		op = clientv3.OpPut(l.stateKey(), string(value))
	}
	return l.commit(ctx, op)
}

// Check is nil while etcd itself says that this process leads.
func (l *Leadership) Check(ctx context.Context) error {
	return l.commit(ctx, clientv3.OpGet(l.stateKey(), clientv3.WithCountOnly()))
}

func (l *Leadership) commit(ctx context.Context, op clientv3.Op) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	mine := clientv3.Compare(clientv3.CreateRevision(l.election.Key()), "=", l.election.Rev())
	resp, err := l.r.cli.Txn(ctx).If(mine).Then(op).Commit()
	if err != nil {
		return fmt.Errorf("lead %s: %w", l.scope, err)
	}
	if !resp.Succeeded {
		return fmt.Errorf("lead %s: %w", l.scope, ErrNotLeading)
	}
	return nil
}

// Resign lets the next one lead, at once: it ends the session, which deletes the election's key.
func (l *Leadership) Resign() error {
	l.session.Orphan() // its keeper ends; the lease is ours to revoke, also when the session's context has ended
	ctx, cancel := context.WithTimeout(context.WithoutCancel(l.r.ctx), callTimeout)
	defer cancel()
	if _, err := l.r.cli.Revoke(ctx, l.session.Lease()); err != nil {
		return fmt.Errorf("give up leading %s (it ends by itself in %s): %w", l.scope, l.r.ttl, err)
	}
	return nil
}
