//! Observes clients from the side of the server: calls, connections by their names, the queues of locks.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::Duration;

use leasehold::Client;
use leasehold_testbed::{Reply, Server, eventually};

use super::{SOON, ask, in_redis, value_of};

/// The number of script calls since the server's start: for grants, releases and renewals.
pub fn script_calls(server: &Server) -> u64 {
    calls(server, "eval") + calls(server, "evalsha")
}

/// Requests for locks so far: script calls, the transactions that acquire free locks, and the commands that release
/// them. The first requests of a connection count some more: see [`warm_up`].
pub fn lock_requests(server: &Server) -> u64 {
    let releases = calls(server, "delex") + calls(server, "delifeq");
    script_calls(server) + calls(server, "exec") + releases
}

/// Sends the first requests of the client for the key "k". With them, its connection finds out which commands the
/// server allows.
pub fn warm_up(client: &Client) {
    for _ in 0..2 {
        client.mutex("k").lock().unwrap().unlock().unwrap();
    }
}

/// The keys of which the server will report the next change, each counted once per client that has read it.
pub fn tracked(server: &Server) -> u64 {
    info_number(server, "stats", "tracking_total_items")
}

/// Reads of locks so far, by scripts and by notification connections.
pub fn reads(server: &Server) -> u64 {
    calls(server, "getrange")
}

/// How many locks notification connections read during `work`.
pub fn reads_during(server: &Server, work: impl FnOnce()) -> usize {
    reads_by_connection(server, work).values().sum()
}

/// The lines that MONITOR shows for `work`.
pub fn monitored(server: &Server, work: impl FnOnce()) -> impl Iterator<Item = String> {
    let mut monitor = TcpStream::connect((Ipv4Addr::LOCALHOST, server.port())).unwrap();
    monitor.set_read_timeout(Some(SOON)).unwrap();
    monitor.write_all(b"MONITOR\r\n").unwrap();
    let mut lines = BufReader::new(monitor).lines().map(Result::unwrap);
    assert_eq!(lines.next().as_deref(), Some("+OK"));
    work();
    ask(server, &["ECHO", "the end"]);
    lines.take_while(|line| !line.ends_with("\"the end\""))
}

/// How many locks each notification connection read during `work`, by the connection's address. The read of the fence
/// counter with which a connection begins does not count.
pub fn reads_by_connection(server: &Server, work: impl FnOnce()) -> HashMap<String, usize> {
    let mut reads = HashMap::new();
    // `+<time> [<database> <address>] "GETRANGE" "<key>" ..`; the address of a script is `lua`.
    for line in monitored(server, work) {
        let Some((sender, arguments)) = line.split_once("] \"GETRANGE\" ") else {
            continue;
        };
        let address = sender
            .rsplit(' ')
            .next()
            .expect("rsplit gives one at least");
        if address != "lua" && !arguments.starts_with(&format!("\"{}", in_redis("~"))) {
            *reads.entry(address.to_owned()).or_default() += 1;
        }
    }
    reads
}

/// The address of the client's only notification connection.
#[track_caller]
pub fn notification_connection(server: &Server, client: &Client) -> String {
    let list = ask(server, &["CLIENT", "LIST"]);
    let lines = list.as_text().expect("CLIENT LIST is text").lines();
    let name = format!(" name=leasehold-notifications:{} ", client.holder_id());
    let mut found = lines.filter(|line| line.contains(&name));
    let line = found.next().expect("there is a notification connection");
    assert!(found.next().is_none(), "there are several");
    let address = line
        .split(' ')
        .find_map(|field| field.strip_prefix("addr="));
    address.expect("CLIENT LIST shows addresses").to_owned()
}

fn calls(server: &Server, command: &str) -> u64 {
    server.calls(command).unwrap()
}

/// The channel of a client with the default prefix.
pub fn channel_of(client: &Client) -> String {
    in_redis(&format!("~to:{}", client.holder_id()))
}

/// The number of notification connections, with those that are being set up.
pub fn notification_connections(server: &Server) -> usize {
    clients_with(server, "")
}

/// The number of clients that receive notifications.
pub fn notified_clients(server: &Server) -> usize {
    clients_with(server, " sub=1 ")
}

fn clients_with(server: &Server, mark: &str) -> usize {
    let list = ask(server, &["CLIENT", "LIST"]);
    let lines = list.as_text().expect("CLIENT LIST is text").lines();
    let of_notifications = lines.filter(|line| line.contains(" name=leasehold-notifications:"));
    of_notifications.filter(|line| line.contains(mark)).count()
}

/// All connections, without that of this request and those of sentinels.
pub fn connections(server: &Server) -> usize {
    let list = ask(server, &["CLIENT", "LIST"]);
    let lines = list.as_text().expect("CLIENT LIST is text").lines();
    let of_clients = lines.filter(|line| !line.contains(" name=sentinel-"));
    of_clients.count() - 1
}

/// The number of connections that the server has accepted, with that of this request.
pub fn connections_accepted(server: &Server) -> u64 {
    info_number(server, "stats", "total_connections_received")
}

/// Bytes that the server has received.
pub fn bytes_received(server: &Server) -> u64 {
    info_number(server, "stats", "total_net_input_bytes")
}

/// Bytes that the server has sent.
pub fn bytes_sent(server: &Server) -> u64 {
    info_number(server, "stats", "total_net_output_bytes")
}

/// How many changes of its data the server has made. A test's server saves nothing, so the count never starts again.
pub fn changes(server: &Server) -> u64 {
    info_number(server, "persistence", "rdb_changes_since_last_save")
}

/// The number that INFO gives for `name`.
pub fn info_number(server: &Server, section: &str, name: &str) -> u64 {
    let info = leasehold_load::info(server, section).unwrap();
    let number = leasehold_load::field(&info, name);
    let number = number.unwrap_or_else(|| panic!("INFO has no {name}"));
    number.parse().expect("a number")
}

/// The time of the server in µs.
pub fn micros_now(server: &Server) -> u64 {
    let Reply::Array(time) = ask(server, &["TIME"]) else {
        panic!("TIME answers with an array");
    };
    let number = |n: usize| time[n].as_text().unwrap().parse::<u64>().unwrap();
    1_000_000 * number(0) + number(1)
}

/// How many connections the server accepts during `work`.
pub fn connections_made(server: &Server, work: impl FnOnce()) -> u64 {
    let before = connections_accepted(server);
    work();
    connections_accepted(server) - before - 1
}

/// The id of the lease that has the lock.
pub fn lease_of(server: &Server, key: &str) -> Option<String> {
    let value = value_of(server, key)?;
    value.split(' ').nth(1).map(str::to_owned)
}

/// The waiters in the queue of the lock in Redis, in their order: `<lease>,<ttl>,<holder>`.
pub fn queue(server: &Server, key: &str) -> Vec<String> {
    let queue = in_redis(&format!("~queue:{key}"));
    let Reply::Array(waiters) = ask(server, &["ZRANGE", &queue, "0", "-1"]) else {
        panic!("ZRANGE answers with an array");
    };
    let text = |waiter: &Reply| waiter.as_text().map(str::to_owned);
    waiters.iter().filter_map(text).collect()
}

/// Makes the first waiter in the queue of the lock appear to have joined this much earlier.
pub fn make_first_join_earlier(server: &Server, key: &str, earlier: Duration) {
    let first = &queue(server, key)[0];
    let queue = in_redis(&format!("~queue:{key}"));
    let earlier = format!("-{}", earlier.as_micros());
    ask(server, &["ZINCRBY", &queue, &earlier, first]);
}

/// The number of waiters in the queue of the lock in Redis: one for each client, however many threads it has.
pub fn queued(server: &Server, key: &str) -> usize {
    queue(server, key).len()
}

/// Waits until the queue of the lock in Redis has `of` waiters.
#[track_caller]
pub fn wait_for_queue(server: &Server, key: &str, of: usize) {
    let there = eventually(SOON, || queued(server, key) == of);
    assert!(there, "not {of} queued: {:?}", queue(server, key));
}
