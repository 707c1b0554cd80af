// Locks of Go libraries for `cargo xtask interop`, used as their documentation shows.
//
// The protocol is that of tools/interop/src/messages.rs: a line with the assignment, and then a line for each order.
// Each answer is a line that begins with "@ ".
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	goredis9 "github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidislock"
)

// Longer than any case. redislock would otherwise wait for the ttl at most.
const patience = 10 * time.Minute

type assignment struct {
	URL     string `json:"url"`
	Library string `json:"library"`
	Name    string `json:"name"`
	PollMs  int64  `json:"poll_ms"`
}

type order struct {
	Do      string `json:"do"`
	TTLMs   int64  `json:"ttl_ms"`
	Count   int    `json:"count"`
	HoldMs  int64  `json:"hold_ms"`
	PauseMs int64  `json:"pause_ms"`
	Locked  bool   `json:"locked"`
}

type report struct {
	Done          bool    `json:"done"`
	Grants        int     `json:"grants"`
	Overlaps      int     `json:"overlaps"`
	LongestWaitMs float64 `json:"longest_wait_ms"`
}

type library interface {
	lock(ttl time.Duration) error
	tryLock(ttl time.Duration) (bool, error)
	unlock() (bool, error)
}

type redsyncLock struct {
	sync *redsync.Redsync
	name string
	poll time.Duration
	held *redsync.Mutex
}

func (l *redsyncLock) mutex(ttl time.Duration) *redsync.Mutex {
	return l.sync.NewMutex(l.name, redsync.WithExpiry(ttl), redsync.WithTries(math.MaxInt32), redsync.WithRetryDelay(l.poll))
}

func (l *redsyncLock) lock(ttl time.Duration) error {
	l.held = l.mutex(ttl)
	return l.held.Lock()
}

func (l *redsyncLock) tryLock(ttl time.Duration) (bool, error) {
	mutex := l.mutex(ttl)
	err := mutex.TryLock()
	var taken *redsync.ErrTaken
	if errors.As(err, &taken) || errors.Is(err, redsync.ErrFailed) {
		return false, nil
	}
	l.held = mutex
	return err == nil, err
}

func (l *redsyncLock) unlock() (bool, error) {
	done, err := l.held.Unlock()
	var taken *redsync.ErrTaken
	if errors.Is(err, redsync.ErrLockAlreadyExpired) || errors.As(err, &taken) {
		return false, nil
	}
	return done, err
}

type bsmLock struct {
	client *redislock.Client
	name   string
	poll   time.Duration
	held   *redislock.Lock
}

func (l *bsmLock) obtain(ttl time.Duration, retry redislock.RetryStrategy) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	l.held, err = l.client.Obtain(ctx, l.name, ttl, &redislock.Options{RetryStrategy: retry})
	return err
}

func (l *bsmLock) lock(ttl time.Duration) error {
	return l.obtain(ttl, redislock.LinearBackoff(l.poll))
}

func (l *bsmLock) tryLock(ttl time.Duration) (bool, error) {
	err := l.obtain(ttl, redislock.NoRetry())
	if errors.Is(err, redislock.ErrNotObtained) {
		return false, nil
	}
	return err == nil, err
}

func (l *bsmLock) unlock() (bool, error) {
	err := l.held.Release(context.Background())
	if errors.Is(err, redislock.ErrLockNotHeld) {
		return false, nil
	}
	return err == nil, err
}

// rueidislock renews its locks, and takes no ttl.
type rueidisLock struct {
	locker rueidislock.Locker
	name   string
	cancel context.CancelFunc
}

func (l *rueidisLock) lock(time.Duration) (err error) {
	_, l.cancel, err = l.locker.WithContext(context.Background(), l.name)
	return err
}

func (l *rueidisLock) tryLock(time.Duration) (bool, error) {
	_, cancel, err := l.locker.TryWithContext(context.Background(), l.name)
	if errors.Is(err, rueidislock.ErrNotLocked) {
		return false, nil
	}
	l.cancel = cancel
	return err == nil, err
}

func (l *rueidisLock) unlock() (bool, error) {
	l.cancel()
	return true, nil
}

func connect(work assignment, options *goredis9.Options, client *goredis9.Client) (library, error) {
	poll := time.Duration(work.PollMs) * time.Millisecond
	switch work.Library {
	case "redsync":
		return &redsyncLock{sync: redsync.New(goredis.NewPool(client)), name: work.Name, poll: poll}, nil
	case "redislock":
		return &bsmLock{client: redislock.New(client), name: work.Name, poll: poll}, nil
	case "rueidislock":
		locker, err := rueidislock.NewLocker(rueidislock.LockerOption{
			ClientOption: rueidis.ClientOption{InitAddress: []string{options.Addr}},
		})
		return &rueidisLock{locker: locker, name: work.Name}, err
	}
	return nil, fmt.Errorf("no library %q", work.Library)
}

// The section that locks must keep to one at a time. Returns whether somebody else was inside.
func enter(client *goredis9.Client, name string, hold time.Duration) (bool, error) {
	ctx := context.Background()
	inside, total := "section:"+name+":inside", "section:"+name+":total"
	count, err := client.Incr(ctx, inside).Result()
	if err != nil {
		return false, err
	}
	before, err := client.Get(ctx, total).Int64()
	if err != nil && !errors.Is(err, goredis9.Nil) {
		return false, err
	}
	time.Sleep(hold)
	if err := client.Set(ctx, total, before+1, 0).Err(); err != nil {
		return false, err
	}
	return count != 1, client.Decr(ctx, inside).Err()
}

func grants(locks library, client *goredis9.Client, name string, work order) (report, error) {
	done := report{Grants: work.Count}
	ttl, hold := time.Duration(work.TTLMs)*time.Millisecond, time.Duration(work.HoldMs)*time.Millisecond
	for range work.Count {
		asked := time.Now()
		if work.Locked {
			if err := locks.lock(ttl); err != nil {
				return done, err
			}
		}
		done.LongestWaitMs = max(done.LongestWaitMs, float64(time.Since(asked).Microseconds())/1000)
		others, err := enter(client, name, hold)
		if err != nil {
			return done, err
		}
		if others {
			done.Overlaps++
		}
		if work.Locked {
			if released, err := locks.unlock(); err != nil || !released {
				return done, fmt.Errorf("the lock was lost: %v", err)
			}
		}
		time.Sleep(time.Duration(rand.Int64N(work.PauseMs*1000+1)) * time.Microsecond)
	}
	return done, nil
}

func serve() error {
	input := bufio.NewScanner(os.Stdin)
	if !input.Scan() {
		return fmt.Errorf("no assignment: %v", input.Err())
	}
	var work assignment
	if err := json.Unmarshal(input.Bytes(), &work); err != nil {
		return err
	}
	options, err := goredis9.ParseURL(work.URL)
	if err != nil {
		return err
	}
	client := goredis9.NewClient(options)
	locks, err := connect(work, options, client)
	if err != nil {
		return err
	}
	if err := client.Ping(context.Background()).Err(); err != nil {
		return err
	}
	orders := make(chan order)
	go func() {
		for input.Scan() {
			var next order
			if err := json.Unmarshal(input.Bytes(), &next); err != nil {
				break
			}
			orders <- next
		}
		// The program that gave the orders has ended.
		os.Exit(1)
	}()
	say(map[string]report{"Ok": {}})
	for next := range orders {
		var done report
		ttl := time.Duration(next.TTLMs) * time.Millisecond
		switch next.Do {
		case "grants":
			done, err = grants(locks, client, work.Name, next)
		case "lock":
			err = locks.lock(ttl)
			done.Done = true
		case "try_lock":
			done.Done, err = locks.tryLock(ttl)
		case "unlock":
			done.Done, err = locks.unlock()
		default:
			err = fmt.Errorf("no order %q", next.Do)
		}
		if err != nil {
			return err
		}
		say(map[string]report{"Ok": done})
	}
	return nil
}

func say(message any) {
	line, err := json.Marshal(message)
	if err != nil {
		panic(err)
	}
	fmt.Printf("@ %s\n", line)
}

func main() {
	if err := serve(); err != nil {
		say(map[string]string{"Err": err.Error()})
		os.Exit(1)
	}
}
