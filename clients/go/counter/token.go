package counter

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"time"
	"unicode/utf8"
)

const (
	keyPrefix     = "key:"
	keyCharsMax   = 255
	labelCharsMax = 256
	timeLayout    = "2006-01-02T15:04:05.000000Z"
)

var (
	uuidForm = regexp.MustCompile(`^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$`)
	timeForm = regexp.MustCompile(
		`^\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d{1,6})?([Zz]|[+-]\d\d:\d\d)$`)
)

// A Credential identifies one intended add: a [Token] or a [Key]. Every attempt carries it, so the
// add counts once.
type Credential interface {
	// String returns the credential as text for [ParseCredential].
	String() string
	// derived returns the credential of a step. It is also what only types of this package have.
	derived(label string) (Credential, error)
}

// A Token is an idempotency token: a random nonce and the time when it was made. Make one for each
// intended add, by [NewToken], and send it with every attempt.
type Token struct {
	nonce  [16]byte
	timeUS int64
}

// NewToken returns a unique token with this machine's time. It panics if the system has no
// randomness.
func NewToken() Token {
	token := Token{timeUS: time.Now().UnixMicro()}
	if _, err := rand.Read(token.nonce[:]); err != nil {
		panic("counter: the system has no randomness: " + err.Error())
	}
	token.nonce[6] = token.nonce[6]&0x0f | 0x40
	token.nonce[8] = token.nonce[8]&0x3f | 0x80
	return token
}

// MakeToken returns the token with this nonce and time, which counts by whole microseconds.
func MakeToken(nonce [16]byte, generated time.Time) Token {
	return Token{nonce, generated.UnixMicro()}
}

// Nonce returns the random part.
func (t Token) Nonce() [16]byte { return t.nonce }

// Time returns when the token was made, in UTC.
func (t Token) Time() time.Time { return time.UnixMicro(t.timeUS).UTC() }

// String returns the token as <UUID>@<RFC 3339 time>.
func (t Token) String() string { return t.nonceText() + "@" + t.timeText() }

// Derive returns the token of the step label (1 to 256 characters) of this token's work. It is the
// same on every machine and in every language. It returns a [RefusedError] for another label.
func (t Token) Derive(label string) (Token, error) {
	if err := checkLabel(label); err != nil {
		return Token{}, err
	}
	derived := Token{timeUS: t.timeUS}
	data := append(append([]byte{}, t.nonce[:]...), label...)
	copy(derived.nonce[:], blake2b(data, len(derived.nonce), "counter.derive"))
	return derived, nil
}

// MarshalJSON writes the form of requests and answers.
func (t Token) MarshalJSON() ([]byte, error) {
	return json.Marshal(wireToken{t.nonceText(), t.timeText()})
}

// UnmarshalJSON reads the form of requests and answers.
func (t *Token) UnmarshalJSON(text []byte) error {
	var found wireToken
	if err := json.Unmarshal(text, &found); err != nil {
		return err
	}
	read, err := parseToken(found.Nonce, found.Time)
	if err == nil {
		*t = read
	}
	return err
}

func (t Token) derived(label string) (Credential, error) { return t.Derive(label) }

func (t Token) timeText() string { return t.Time().Format(timeLayout) }

func (t Token) nonceText() string {
	text := hex.EncodeToString(t.nonce[:])
	return text[:8] + "-" + text[8:12] + "-" + text[12:16] + "-" + text[16:20] + "-" + text[20:]
}

type wireToken struct {
	Nonce string `json:"token"`
	Time  string `json:"generation_time"`
}

// A Key is an idempotency key: the program's own id, such as order-123. It has no time: the service
// reserves one when it first sees the key, and remembers the key for the namespace's key_ttl.
type Key struct {
	text string
}

// NewKey returns text as a key: 1 to 255 visible ASCII characters, with spaces only inside. It
// returns a [RefusedError] for another text.
func NewKey(text string) (Key, error) {
	if len(text) < 1 || utf8.RuneCountInString(text) > keyCharsMax {
		return Key{}, invalid("the key has %d characters; 1 to %d are allowed",
			utf8.RuneCountInString(text), keyCharsMax)
	}
	for i := 0; i < len(text); i++ {
		if text[i] < ' ' || text[i] > '~' {
			return Key{}, invalid("the key %.80q must be visible ASCII: hash other ids", text)
		}
	}
	if strings.Trim(text, " ") != text {
		return Key{}, invalid("the key %.80q begins or ends with a space: leave it out", text)
	}
	return Key{text}, nil
}

// Text returns the key without a prefix.
func (k Key) Text() string { return k.text }

// String returns the key as key:<key>.
func (k Key) String() string { return keyPrefix + k.text }

// Derive returns the key of the step label (1 to 256 characters), the same on every machine and in
// every language. It returns a [RefusedError] for another label.
func (k Key) Derive(label string) (Key, error) {
	if err := checkLabel(label); err != nil {
		return Key{}, err
	}
	data := binary.BigEndian.AppendUint32(nil, uint32(len(k.text)))
	data = append(append(data, k.text...), label...)
	return Key{"derived:" + hex.EncodeToString(blake2b(data, 24, "counter.keystep"))}, nil
}

func (k Key) derived(label string) (Credential, error) { return k.Derive(label) }

// ParseCredential parses the String of a token or a key. It returns a [RefusedError] for another
// text.
func ParseCredential(text string) (Credential, error) {
	if strings.HasPrefix(text, keyPrefix) {
		return NewKey(text[len(keyPrefix):])
	}
	nonce, moment, _ := strings.Cut(text, "@")
	token, err := parseToken(nonce, moment)
	if err != nil {
		return nil, invalid("%.80q is not a token; it is written <UUID>@<RFC 3339 time> or"+
			" key:<key>", text)
	}
	return token, nil
}

func parseToken(nonce, moment string) (Token, error) {
	if !uuidForm.MatchString(nonce) {
		return Token{}, fmt.Errorf("%.80q is not a UUID", nonce)
	}
	generated, err := parseTime(moment)
	if err != nil {
		return Token{}, err
	}
	token := Token{timeUS: generated.UnixMicro()}
	_, err = hex.Decode(token.nonce[:], []byte(strings.ReplaceAll(nonce, "-", "")))
	return token, err
}

// parseTime parses RFC 3339 with an offset and at most microseconds.
func parseTime(text string) (time.Time, error) {
	if !timeForm.MatchString(text) {
		return time.Time{}, fmt.Errorf("%.80q is not RFC 3339 with at most microseconds", text)
	}
	text = strings.ToUpper(text)
	return time.Parse(time.RFC3339Nano, text[:10]+"T"+text[11:])
}

func checkLabel(label string) error {
	if chars := utf8.RuneCountInString(label); chars < 1 || chars > labelCharsMax {
		return invalid("the label has %d characters; 1 to %d are allowed", chars, labelCharsMax)
	}
	if !utf8.ValidString(label) {
		return invalid("the label %.80q is not valid UTF-8", label)
	}
	return nil
}
