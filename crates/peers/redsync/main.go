// Locks of redsync on several servers, used as its documentation shows, for benches/quorum.
//
// Build it with `go build`, and give the program to the bench: `cargo bench --bench quorum -- --peer redsync=./redsync`.
// The same bench takes `leasehold-peers`, which has the locks of the crate redlock.
//
// The protocol is that of crates/load/src/turns.rs: a line with the URLs, and then lines with a number of pairs. Each
// answer is a line that begins with "@ ".
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	goredis9 "github.com/redis/go-redis/v9"
)

const ttl = 30 * time.Second

type turns struct {
	Micros    []int64 `json:"micros"`
	CPUMicros int64   `json:"cpu_micros"`
}

func main() {
	if err := serve(); err != nil {
		say(map[string]string{"Err": err.Error()})
		os.Exit(1)
	}
}

func serve() error {
	input := bufio.NewScanner(os.Stdin)
	if !input.Scan() {
		return fmt.Errorf("no list of URLs: %v", input.Err())
	}
	var urls []string
	if err := json.Unmarshal(input.Bytes(), &urls); err != nil {
		return err
	}
	var pools []redis.Pool
	for _, url := range urls {
		options, err := goredis9.ParseURL(url)
		if err != nil {
			return err
		}
		pools = append(pools, goredis.NewPool(goredis9.NewClient(options)))
	}
	mutex := redsync.New(pools...).NewMutex("redsync", redsync.WithExpiry(ttl))
	say(map[string]turns{"Ok": {Micros: []int64{}}})
	for input.Scan() {
		count, err := strconv.Atoi(strings.TrimSpace(input.Text()))
		if err != nil {
			return err
		}
		done, err := run(mutex, count)
		if err != nil {
			return err
		}
		say(map[string]turns{"Ok": done})
	}
	return input.Err()
}

func run(mutex *redsync.Mutex, count int) (turns, error) {
	done := turns{Micros: make([]int64, 0, count)}
	before, err := ownCPU()
	if err != nil {
		return done, err
	}
	for range count {
		start := time.Now()
		if err := mutex.Lock(); err != nil {
			return done, err
		}
		if _, err := mutex.Unlock(); err != nil {
			return done, err
		}
		done.Micros = append(done.Micros, time.Since(start).Microseconds())
	}
	after, err := ownCPU()
	done.CPUMicros = (after - before).Microseconds()
	return done, err
}

// The CPU time that this process has used.
func ownCPU() (time.Duration, error) {
	var usage syscall.Rusage
	err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage)
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano()), err
}

func say(message any) {
	line, err := json.Marshal(message)
	if err != nil {
		panic(err)
	}
	fmt.Printf("@ %s\n", line)
}
