package router

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"
)

const (
	keyScheme   = "bearer "
	keyHashMark = "sha256:"
	keyNameMax  = 64
	keysFileMax = 16 << 20
)

// keyring knows API keys by their hashes. Without any it lets everybody in.
//
// The hash is a fast one: keys that the router makes are 256 random bits, which nobody finds by trying, however fast. What a
// slow hash is for, passwords that people think of, would cost each request tens of milliseconds.
type keyring struct {
	// keys by the first eight bytes of their hashes: how long it takes to find one says something about hashes at most, of which
	// there is no way back to keys.
	keys map[uint64][]apiKey
}

// apiKey is a key that is let in.
type apiKey struct {
	hash [sha256.Size]byte
	name string
}

// add takes a key; one that is there already keeps its name.
func (k *keyring) add(key apiKey) {
	if k.keys == nil {
		k.keys = map[uint64][]apiKey{}
	}
	at := binary.LittleEndian.Uint64(key.hash[:])
	for _, other := range k.keys[at] {
		if other.hash == key.hash {
			return
		}
	}
	k.keys[at] = append(k.keys[at], key)
}

// size is how many keys there are.
func (k *keyring) size() int {
	n := 0
	for _, same := range k.keys {
		n += len(same)
	}
	return n
}

// admits judges an Authorization header and says whose key it has: "" where no keys are asked for. The time it takes does not
// depend on how much of a key fits.
func (k *keyring) admits(authorization []byte) (who string, ok bool) {
	if len(k.keys) == 0 {
		return "", true
	}
	if len(authorization) < len(keyScheme) || !bytes.EqualFold(authorization[:len(keyScheme)], []byte(keyScheme)) {
		return "", false
	}
	sum := sha256.Sum256(bytes.TrimSpace(authorization[len(keyScheme):]))
	for _, key := range k.keys[binary.LittleEndian.Uint64(sum[:])] {
		if subtle.ConstantTimeCompare(key.hash[:], sum[:]) == 1 {
			return key.name, true
		}
	}
	return "", false
}

// plainKey is a key that is not hashed, named after its hash.
func plainKey(key string) apiKey {
	sum := sha256.Sum256([]byte(key))
	return apiKey{sum, keyHashMark + hex.EncodeToString(sum[:4])}
}

// KeyName checks a name for an API key: it stands in logs.
func KeyName(name string) error {
	if name == "" || len(name) > keyNameMax {
		return fmt.Errorf("name of a key %q: use 1 to %d characters", name, keyNameMax)
	}
	for _, c := range []byte(name) {
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' && c != '_' && c != '.' && c != '@' {
			return fmt.Errorf("name of a key %q: use letters, digits and -_.@", name)
		}
	}
	return nil
}

// KeyLine is the line by which a file of API keys knows a key. It is not secret: there is no way from it to the key.
func KeyLine(name, key string) string {
	sum := sha256.Sum256([]byte(key))
	return name + " " + keyHashMark + hex.EncodeToString(sum[:])
}

// readKeys reads lines of NAME sha256:HEX, or keys as they are, which it counts. # begins a comment.
func readKeys(r io.Reader, ring *keyring) (plain int, err error) {
	s := bufio.NewScanner(r)
	for n := 1; s.Scan(); n++ {
		fields := strings.Fields(s.Text())
		if len(fields) == 0 || fields[0][0] == '#' {
			continue
		}
		key, hashed, err := parseKey(fields)
		if err != nil {
			return plain, fmt.Errorf("line %d: %w", n, err)
		}
		if !hashed {
			plain++
		}
		ring.add(key)
	}
	return plain, s.Err()
}

// parseKey takes the words of a line. Errors do not have them: they may be keys.
func parseKey(fields []string) (key apiKey, hashed bool, err error) {
	if len(fields) == 1 && !strings.HasPrefix(fields[0], keyHashMark) {
		return plainKey(fields[0]), false, nil
	}
	digits, marked := strings.CutPrefix(fields[len(fields)-1], keyHashMark)
	if !marked || len(fields) != 2 {
		return key, false, errors.New("use NAME sha256:HEX, as `headrace key new NAME` prints it")
	}
	if key.name = fields[0]; KeyName(key.name) != nil {
		return key, false, KeyName(key.name)
	}
	b, err := hex.DecodeString(digits)
	if err != nil || len(b) != sha256.Size {
		return key, false, fmt.Errorf("the hash of %s is not %d hexadecimal digits", key.name, 2*sha256.Size)
	}
	copy(key.hash[:], b)
	return key, true, nil
}

// loadKeys makes a ring of list, which are keys as they are, and file.
func loadKeys(list []string, path string, log *slog.Logger) (*keyring, error) {
	ring := &keyring{}
	for _, k := range list {
		if strings.TrimSpace(k) == "" {
			return nil, errors.New("configure router: an API key is empty")
		}
		ring.add(plainKey(k))
	}
	if path == "" {
		return ring, nil
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read API keys: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("read API keys: %w", err)
	}
	if info.Mode().Perm()&0o022 != 0 {
		return nil, fmt.Errorf("read API keys from %s: others may write it (mode %o), and let themselves in; chmod 600 %s", path, info.Mode().Perm(), path)
	}
	plain, err := readKeys(io.LimitReader(f, keysFileMax), ring)
	if err != nil {
		return nil, fmt.Errorf("read API keys from %s: %w", path, err)
	}
	if ring.size() == 0 {
		return nil, fmt.Errorf("read API keys from %s: it has none, which would lock everybody out; leave the file out to let everybody in", path)
	}
	if plain > 0 {
		log.Warn("API keys stand in their file as they are: whoever reads it, or a copy of it, can use them; replace each by the line that `headrace key hash NAME` prints for it",
			"file", path, "keys", plain, "mode", fmt.Sprintf("%o", info.Mode().Perm()))
	}
	return ring, nil
}

// keys is the ring as the file has it now.
type keys struct {
	list []string
	path string
	log  *slog.Logger
	ring atomic.Pointer[keyring]

	mu   sync.Mutex // guards what follows
	seen os.FileInfo
}

func newKeys(list []string, path string, log *slog.Logger) (*keys, error) {
	k := &keys{list: append([]string(nil), list...), path: path, log: log}
	return k, k.reload()
}

// reload reads the file again. If it cannot be used the keys stay as they were.
func (k *keys) reload() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.path != "" {
		k.seen, _ = os.Stat(k.path) // before it is read: what is written meanwhile is another change
	}
	ring, err := loadKeys(k.list, k.path, k.log)
	if err != nil {
		return err
	}
	k.ring.Store(ring)
	return nil
}

// look reads the file again if it is another one than at the last look, or was changed. It says what came of it once.
func (k *keys) look() {
	info, _ := os.Stat(k.path)
	k.mu.Lock()
	seen := k.seen
	k.mu.Unlock()
	if sameFile(info, seen) && (info == nil || info.Mode() == seen.Mode()) {
		return
	}
	k.say(k.reload())
}

func (k *keys) say(err error) {
	if err != nil {
		k.log.Error("API keys could not be read again: those known stay", "err", err)
		return
	}
	k.log.Info("API keys read again", "file", k.path, "keys", k.ring.Load().size())
}

// ReloadKeys reads the file of API keys again, as also happens by itself within seconds of a change. After an error the keys
// are as they were. Without a file it does nothing.
func (r *Router) ReloadKeys() error {
	if r.keys.path == "" {
		return nil
	}
	err := r.keys.reload()
	r.keys.say(err)
	return err
}
