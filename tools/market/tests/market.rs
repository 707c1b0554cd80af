//! `cargo xtask market` as a user runs it, in its quick form.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use leasehold_testbed::{Reply, Server, eventually};
use rustix::process::{Pid, Signal, kill_process};

const PROGRAM: &str = env!("CARGO_BIN_EXE_leasehold-market");
const LIMIT: Duration = Duration::from_secs(60);

fn keys(server: &Server) -> i64 {
    match server.command(&["DBSIZE"]) {
        Ok(Reply::Int(keys)) => keys,
        other => panic!("{other:?}"),
    }
}

#[test]
fn all_methods_pass_and_the_page_is_written() {
    let server = Server::start().expect("Redis is installed");
    let target = Path::new(PROGRAM).ancestors().nth(2).expect("a folder");
    let page = target.join("market/index.html");
    let _ = fs::remove_file(&page);

    let ran = Command::new(PROGRAM)
        .args(["--quick", "--url", &server.url()])
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
    assert_eq!(page.matches("<figcaption>With 5 sellers").count(), 6);
    assert_eq!(page.matches("<table>").count(), 4);
}

#[test]
fn ctrl_c_leaves_nothing_behind() {
    let server = Server::start().expect("Redis is installed");
    let mut market = Command::new(PROGRAM)
        .args(["--seconds", "600", "--url", &server.url()])
        // Without this variable, the program does not make an optimized build first.
        .env_remove("CARGO")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it runs");
    // The first line of output shows that the program has started.
    let mut output = BufReader::new(market.stdout.take().expect("it is piped"));
    output.read_line(&mut String::new()).expect("it speaks");
    // Two accounts, an inventory, and the market.
    assert!(eventually(LIMIT, || keys(&server) >= 4), "no trade");

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

#[cfg(target_os = "linux")]
#[test]
fn passwords_never_appear_in_process_lists() {
    const PASSWORD: &str = "of-a-trader";
    let server = Server::start().expect("Redis is installed");
    let user = [
        "ACL",
        "SETUSER",
        "trader",
        "on",
        ">of-a-trader",
        "~*",
        "&*",
        "+@all",
    ];
    server.command(&user).expect("it answers");
    let address = server.url();
    let address = address.strip_prefix("redis://").expect("it is a URL");
    let mut market = Command::new(PROGRAM)
        .args(["--seconds", "600"])
        .env(
            "LEASEHOLD_URL",
            format!("redis://trader:{PASSWORD}@{address}"),
        )
        .env_remove("CARGO")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("it runs");
    assert!(eventually(LIMIT, || keys(&server) >= 4), "no trade");
    let arguments = arguments_of_family(market.id());
    kill_process(Pid::from_child(&market), Signal::INT).expect("it is running");
    assert_eq!(market.wait().expect("it ends").code(), Some(130));
    assert!(arguments.len() > 1, "it starts processes: {arguments:?}");
    let shown = arguments.iter().find(|line| line.contains(PASSWORD));
    assert_eq!(shown, None);
}

/// The arguments of the process `parent` and of its child processes, as `ps` shows them.
#[cfg(target_os = "linux")]
fn arguments_of_family(parent: u32) -> Vec<String> {
    let processes = fs::read_dir("/proc").expect("Linux has it").flatten();
    let member = |folder: &Path| {
        let stat = fs::read_to_string(folder.join("stat")).ok()?;
        // The name before it, in brackets, may contain anything.
        let (_, numbers) = stat.rsplit_once(')')?;
        let started_by = numbers.split_whitespace().nth(1)?.parse();
        let is_parent = folder.ends_with(parent.to_string());
        (is_parent || started_by == Ok(parent)).then_some(())?;
        let arguments = fs::read(folder.join("cmdline")).ok()?;
        Some(String::from_utf8_lossy(&arguments).replace('\0', " "))
    };
    processes
        .filter_map(|process| member(&process.path()))
        .collect()
}
