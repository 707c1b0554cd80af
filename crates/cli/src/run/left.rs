//! Finds processes that have left the group of the command. On Linux, a process whose parent has ended becomes a child
//! of this program, so this program finds it. On other systems, this program does not find such processes.

use rustix::process::Pid;

/// A process that the command, or another process of its group, has started.
pub struct Child {
    pub id: Pid,
    pub name: String,
}

/// The present children of this program, without those in `known`.
#[cfg(target_os = "linux")]
pub fn children(known: &[Pid]) -> Vec<Child> {
    use std::fs;

    let Ok(tasks) = fs::read_dir("/proc/self/task") else {
        return Vec::new();
    };
    let lists =
        tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("children")).ok());
    let lists: Vec<String> = lists.collect();
    let ids = lists.iter().flat_map(|list| list.split_whitespace());
    let ids = ids.filter_map(|id| Pid::from_raw(id.parse().ok()?));
    let child = |id: Pid| {
        let name =
            fs::read_to_string(format!("/proc/{}/comm", id.as_raw_pid())).unwrap_or_default();
        Child {
            id,
            name: name.trim_end().to_owned(),
        }
    };
    ids.filter(|id| !known.contains(id)).map(child).collect()
}

#[cfg(not(target_os = "linux"))]
pub fn children(_known: &[Pid]) -> Vec<Child> {
    Vec::new()
}

/// Makes this program the new parent of processes whose parent ends. Returns the children that this process already has:
/// a shell that starts this program by `exec` leaves its own.
pub fn adopt() -> Vec<Pid> {
    #[cfg(target_os = "linux")]
    // If this fails, this program does not find such processes.
    let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
    children(&[]).into_iter().map(|child| child.id).collect()
}
