package child

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"
)

const testEnv = "HEADRACE_TEST_CHILD"

type testConfig struct {
	Word string
	Fail bool
}

func TestMain(m *testing.M) {
	Main(testEnv, "test child", func(ctx context.Context, c *testConfig) error {
		if c.Fail {
			return errors.New("told to fail")
		}
		if err := Ready(map[string]string{"word": c.Word}); err != nil {
			return err
		}
		<-ctx.Done()
		return Ready(map[string]string{"word": c.Word + " gone"})
	})
	os.Exit(m.Run())
}

// A part says what it was told, and ends well when its parent lets go of it.
func TestPart(t *testing.T) {
	var said struct{ Word string }
	p, err := StartPart(t.Context(), testEnv, "a part", nil, nil, &testConfig{Word: "heron"}, &said)
	if err != nil {
		t.Fatal(err)
	}
	if said.Word != "heron" {
		t.Errorf("it said %q", said.Word)
	}
	if err := p.Stop(10 * time.Second); err != nil {
		t.Error(err)
	}
}

// Its last word is heard.
func TestFinish(t *testing.T) {
	var said, last struct{ Word string }
	p, err := StartPart(t.Context(), testEnv, "a part", nil, nil, &testConfig{Word: "heron"}, &said)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Finish(10*time.Second, &last); err != nil || last.Word != "heron gone" {
		t.Errorf("at its end it said %q, %v", last.Word, err)
	}
}

// One that fails before it is ready is an error with its own words.
func TestPartFails(t *testing.T) {
	_, err := StartPart(t.Context(), testEnv, "a part", nil, nil, &testConfig{Fail: true}, &struct{}{})
	if err == nil || !strings.Contains(err.Error(), "told to fail") {
		t.Errorf("started: %v", err)
	}
}

// One that does not end by itself is killed.
func TestStopByForce(t *testing.T) {
	p, err := Start(t.Context(), "sleep", nil, nil, "sleep", "600")
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Stop(0); err == nil {
		t.Error("it ended well")
	}
}
