//! `cargo xtask market` as a user runs it, in its quick form.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use leasehold_testbed::{Reply, Server, eventually};
use rustix::process::{Pid, Signal, kill_process};

const PROGRAM: &str = env!("CARGO_BIN_EXE_xtask");
const PATIENCE: Duration = Duration::from_secs(60);

fn keys(server: &Server) -> i64 {
    match server.command(&["DBSIZE"]) {
        Ok(Reply::Int(keys)) => keys,
        other => panic!("{other:?}"),
    }
}

#[test]
fn all_ways_keep_the_books_right_and_the_page_is_written() {
    let server = Server::start().expect("Redis is installed");
    let target = Path::new(PROGRAM).ancestors().nth(2).expect("a folder");
    let page = target.join("market/index.html");
    let _ = fs::remove_file(&page);

    let ran = Command::new(PROGRAM)
        .args(["market", "--quick", "--url", &server.url()])
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success(), "{said}\n{ran:?}");
    assert!(said.contains("no money was made or lost"), "{said}");
    for way in [
        "WATCH",
        "lock",
        "lock per item",
        "with transaction",
        "WATCH, plain",
    ] {
        assert!(said.contains(&format!("5x5    {way} ")), "{way}: {said}");
    }
    assert_eq!(keys(&server), 0, "its prefix is empty again");

    let page = fs::read_to_string(page).expect("the page is there");
    assert_eq!(
        page.matches("<svg").count(),
        6,
        "three figures, ours and the article's"
    );
    assert_eq!(page.matches("</svg>").count(), 6);
}

#[test]
fn stopped_by_ctrl_c_it_leaves_nothing_behind() {
    let server = Server::start().expect("Redis is installed");
    let mut market = Command::new(PROGRAM)
        .args(["market", "--seconds", "600", "--url", &server.url()])
        // What cargo starts is built anew, optimized.
        .env_remove("CARGO")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it runs");
    // Not before it has begun: the first thing that it says.
    let mut output = BufReader::new(market.stdout.take().expect("it is piped"));
    output.read_line(&mut String::new()).expect("it speaks");
    // Two accounts, an inventory, and what is on the market.
    assert!(eventually(PATIENCE, || keys(&server) >= 4), "no trade");

    let pid = Pid::from_child(&market);
    kill_process(pid, Signal::INT).expect("it is running");
    let status = market.wait().expect("it ends");
    assert_eq!(status.code(), Some(130));
    let mut said = String::new();
    let mut errors = market.stderr.take().expect("it is piped");
    errors.read_to_string(&mut said).expect("it is text");
    assert_eq!(said.trim(), "stopped");
    assert_eq!(keys(&server), 0, "its prefix is empty again");
}
