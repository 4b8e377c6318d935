//! The CPUs that this process may use, found without an allocation: a first call must also work where there is no
//! memory left.
//!
//! Which ones: those of the affinity masks of its threads, all together. A single thread's mask says little: OpenMP and
//! MPI launchers hold each thread to a CPU of its own. How many: no more than the CPU quota of the process's cgroup, or
//! of any group above it, allows, by the rules of std::thread::available_parallelism, which allocates.

use std::{
    ffi::{CStr, c_int},
    iter, str,
    sync::atomic::{AtomicU64, Ordering},
};

use crate::cancel;

/// What this library calls its own threads.
pub const OWN_NAME: &CStr = c"gradcodec";

/// Enough for /proc/self/cgroup: about ten lines, each with a path.
const TEXT_BYTES: usize = 4096;

/// Entries of a folder at a time: some thirty threads.
const ENTRY_BYTES: usize = 1024;

/// Where version 2 of cgroups is mounted, and the CPU controller of version 1; see file-hierarchy(7) and cgroups(7).
const MOUNT_V2: &[u8] = b"/sys/fs/cgroup";
const MOUNTS_V1: [&[u8]; 2] = [b"/sys/fs/cgroup/cpu", b"/sys/fs/cgroup/cpu,cpuacct"];

/// Words of a set: of 8192 CPUs, the most that Linux can be built for on x86-64. cpu_set_t has room for 1024.
const SET_WORDS: usize = 128;

/// Some of the machine's CPUs: bit number `cpu % 64` of word `cpu / 64`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CpuSet([u64; SET_WORDS]);

impl CpuSet {
    /// The CPUs that a thread may run on; 0 is the caller. None where the thread has ended, or the system does not
    /// tell.
    pub fn of_thread(id: libc::pid_t) -> Option<Self> {
        let mut set = [0u64; SET_WORDS];
        // SAFETY: writes no more than the size of the set. Any bits are a set.
        let refused = unsafe { libc::sched_getaffinity(id, size_of_val(&set), (&raw mut set).cast()) } != 0;
        (!refused).then_some(Self(set))
    }

    /// Has a thread of this library run on these CPUs. It runs where it did if the system refuses.
    pub fn give(&self, thread: libc::pthread_t) {
        // SAFETY: the library's threads never end; reads no more than the size of the set.
        unsafe { libc::pthread_setaffinity_np(thread, size_of_val(&self.0), (&raw const self.0).cast()) };
    }

    fn add(&mut self, other: &Self) {
        self.0.iter_mut().zip(&other.0).for_each(|(own, others)| *own |= others);
    }

    fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }
}

/// A set that threads may read and change at the same time, word by word.
pub struct SharedCpuSet([AtomicU64; SET_WORDS]);

impl SharedCpuSet {
    /// No CPU.
    pub const fn new() -> Self {
        Self([const { AtomicU64::new(0) }; SET_WORDS])
    }

    pub fn has_all_of(&self, set: &CpuSet) -> bool {
        set.0.iter().zip(&self.0).all(|(bits, own)| bits & !own.load(Ordering::Relaxed) == 0)
    }

    pub fn load(&self) -> CpuSet {
        CpuSet(self.0.each_ref().map(|word| word.load(Ordering::Relaxed)))
    }

    pub fn store(&self, set: &CpuSet) {
        self.0.iter().zip(set.0).for_each(|(own, bits)| own.store(bits, Ordering::Relaxed));
    }
}

/// Adds to the CPUs that the caller may run on those of the process's other threads. Threads of this library do not
/// count, which have what was found before.
#[inline(never)] // its buffers are not to lie on the stack beside those of `count`
pub fn add_those_of_the_process(set: &mut CpuSet) {
    // Opening and reading files are cancellation points.
    let _delay = cancel::delay();
    let Some(tasks) = File::open([b"/proc/self/task", b"", b""]) else { return };
    let mut entries = [0; ENTRY_BYTES];
    while let Some(entries) = tasks.entries(&mut entries) {
        for name in names(entries) {
            let Some(id) = number(name) else { continue }; // "." and ".."
            let mut text = [0; 64];
            let called = read([b"/proc/self/task/", name, b"/comm"], &mut text);
            if called.is_none_or(|called| called.trim_ascii() != OWN_NAME.to_bytes())
                && let Some(others) = CpuSet::of_thread(id)
            {
                set.add(&others);
            }
        }
    }
}

/// How many of these CPUs the process may keep busy, at least 1; of all that are there, if it is not known which ones.
#[inline(never)]
pub fn count(set: Option<&CpuSet>) -> usize {
    let _delay = cancel::delay();
    let cpus = set.map_or_else(online, CpuSet::len);
    quota().map_or(cpus, |quota| cpus.min(quota)).max(1)
}

fn online() -> usize {
    // SAFETY: a name that exists.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }).unwrap_or(1)
}

/// The CPUs that the quotas of the process's group and of those above it allow; None without a quota.
fn quota() -> Option<usize> {
    let mut text = [0; TEXT_BYTES];
    match group_of(read([b"/proc/self/cgroup", b"", b""], &mut text)?)? {
        Group::V1(path) => MOUNTS_V1.iter().filter_map(|mount| least(path, |group| quota_v1(mount, group))).min(),
        Group::V2(path) => least(path, |group| quota_v2(MOUNT_V2, group)),
    }
}

/// The smallest quota of a group and of those above it. In a container the path may be the host's, of which only the
/// container's own group is there, as the mount itself: groups that are not there have no quota.
fn least(path: &[u8], quota_of: impl FnMut(&[u8]) -> Option<usize>) -> Option<usize> {
    with_ancestors(path).filter_map(quota_of).min()
}

fn quota_v1(mount: &[u8], group: &[u8]) -> Option<usize> {
    let (mut limit, mut period) = ([0; 64], [0; 64]);
    let limit = read([mount, group, b"/cpu.cfs_quota_us"], &mut limit)?;
    let period = read([mount, group, b"/cpu.cfs_period_us"], &mut period)?;
    whole_cpus(limit, period)
}

fn quota_v2(mount: &[u8], group: &[u8]) -> Option<usize> {
    let mut text = [0; 64];
    cpu_max(read([mount, group, b"/cpu.max"], &mut text)?)
}

/// A process's group: its path below the mount of its hierarchy.
#[derive(Debug, PartialEq)]
enum Group<'a> {
    V1(&'a [u8]),
    V2(&'a [u8]),
}

/// The group that limits CPU time, from the text of /proc/self/cgroup. Version 1 says which controllers a group has, so
/// it goes before version 2.
fn group_of(text: &[u8]) -> Option<Group<'_>> {
    let mut found = None;
    for line in text.split(|&byte| byte == b'\n') {
        // number:controllers:path; a path may have colons.
        let mut fields = line.splitn(3, |&byte| byte == b':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        if controllers.split(|&byte| byte == b',').any(|name| name == b"cpu") {
            return Some(Group::V1(path));
        }
        if controllers.is_empty() {
            found = Some(Group::V2(path));
        }
    }
    found
}

/// "/a/b", then "/a", then "".
fn with_ancestors(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    fn parent<'a>(path: &&'a [u8]) -> Option<&'a [u8]> {
        let slash = path.iter().rposition(|&byte| byte == b'/')?;
        path.get(..slash)
    }
    iter::successors(Some(path.strip_suffix(b"/").unwrap_or(path)), parent)
}

/// The whole CPUs in the text of cpu.max: "limit period", or "max period" for no limit.
fn cpu_max(text: &[u8]) -> Option<usize> {
    let mut words = text.trim_ascii().splitn(2, |&byte| byte == b' ');
    whole_cpus(words.next()?, words.next()?)
}

/// The whole CPUs that `limit` microseconds of work in every `period` microseconds take. A limit of -1 is none.
fn whole_cpus(limit: &[u8], period: &[u8]) -> Option<usize> {
    number::<usize>(limit)?.checked_div(number(period)?)
}

fn number<T: str::FromStr>(text: &[u8]) -> Option<T> {
    str::from_utf8(text.trim_ascii()).ok()?.parse().ok()
}

/// A file or a folder that is open.
struct File(c_int);

impl Drop for File {
    fn drop(&mut self) {
        // SAFETY: opened by `open`, and not used any more.
        unsafe { libc::close(self.0) };
    }
}

impl File {
    /// Opens what the path names that the three parts make.
    #[inline(never)] // its buffer is not to lie on the stack while the file is read
    fn open(path: [&[u8]; 3]) -> Option<Self> {
        let mut joined = [0; libc::PATH_MAX as usize];
        let mut length = 0;
        for part in path {
            joined.get_mut(length..length + part.len())?.copy_from_slice(part);
            length += part.len();
        }
        let joined = CStr::from_bytes_until_nul(&joined).ok()?;
        // SAFETY: a path that ends with a NUL.
        let file = unsafe { libc::open(joined.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) };
        (file >= 0).then_some(Self(file))
    }

    /// Reads what comes next, some or all of it.
    fn read(&self, room: &mut [u8]) -> Option<usize> {
        // SAFETY: writes to `room`, no more than its length.
        usize::try_from(unsafe { libc::read(self.0, room.as_mut_ptr().cast(), room.len()) }).ok()
    }

    /// The next entries of a folder, as the kernel writes them: opendir() would allocate. None after the last.
    fn entries<'a>(&self, room: &'a mut [u8]) -> Option<&'a [u8]> {
        // SAFETY: writes to `room`, no more than its length.
        let written = unsafe { libc::syscall(libc::SYS_getdents64, self.0, room.as_mut_ptr(), room.len()) };
        let written = usize::try_from(written).ok().filter(|&bytes| bytes > 0)?;
        room.get(..written)
    }
}

/// The names in entries of a folder (getdents64(2)): the length of an entry is at byte 16, its name at byte 19.
fn names(mut entries: &[u8]) -> impl Iterator<Item = &[u8]> {
    iter::from_fn(move || {
        let length = u16::from_ne_bytes(entries.get(16..18)?.try_into().ok()?);
        let (entry, rest) = entries.split_at_checked(usize::from(length))?;
        entries = rest;
        Some(CStr::from_bytes_until_nul(entry.get(19..)?).ok()?.to_bytes())
    })
}

/// The text of the file whose path the three parts make. Of a file longer than the buffer, the whole lines that fit.
fn read<'a>(path: [&[u8]; 3], buffer: &'a mut [u8]) -> Option<&'a [u8]> {
    let file = File::open(path)?;
    let mut filled = 0;
    while let Some(bytes) = file.read(&mut buffer[filled..]).filter(|&bytes| bytes > 0) {
        filled += bytes;
    }
    if filled < buffer.len() {
        return buffer.get(..filled);
    }
    buffer.iter().rposition(|&byte| byte == b'\n').and_then(|end| buffer.get(..end))
}

#[cfg(test)]
mod tests {
    use std::{fs, thread};

    use super::*;

    /// The first CPU of a set alone.
    fn first_of(set: &CpuSet) -> CpuSet {
        let mut one = CpuSet([0; SET_WORDS]);
        let word = set.0.iter().position(|&word| word != 0).unwrap();
        one.0[word] = set.0[word] & set.0[word].wrapping_neg();
        one
    }

    fn hold_this_thread_to(set: &CpuSet) {
        // SAFETY: reads no more than the size of the set.
        let refused = unsafe { libc::sched_setaffinity(0, size_of_val(&set.0), (&raw const set.0).cast()) };
        assert_eq!(refused, 0);
    }

    #[test]
    fn the_count_is_that_of_the_standard_library() {
        let counts = || (count(CpuSet::of_thread(0).as_ref()), thread::available_parallelism().unwrap().get());
        let (ours, theirs) = counts();
        assert_eq!(ours, theirs);
        // On one CPU of those that this process has, in a thread of its own.
        let (ours, theirs) = thread::spawn(move || {
            hold_this_thread_to(&first_of(&CpuSet::of_thread(0).unwrap()));
            counts()
        })
        .join()
        .unwrap();
        assert_eq!((ours, theirs), (1, 1));
    }

    #[test]
    fn a_process_may_use_what_any_of_its_threads_may_use() {
        let all = CpuSet::of_thread(0).unwrap();
        let one = first_of(&all);
        let mut found = all;
        add_those_of_the_process(&mut found);
        assert_eq!(found, all);
        thread::spawn(move || {
            hold_this_thread_to(&one);
            assert_eq!(CpuSet::of_thread(0), Some(one));
            let mut found = one;
            add_those_of_the_process(&mut found);
            assert_eq!(found, all, "the thread that started this one may use all of them");
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_set_has_all_cpus_of_those_within_it() {
        let set = |cpus: &[usize]| {
            let mut set = CpuSet([0; SET_WORDS]);
            cpus.iter().for_each(|cpu| set.0[cpu / 64] |= 1 << (cpu % 64));
            set
        };
        let (shared, mut both) = (SharedCpuSet::new(), set(&[0, 8191]));
        assert!(shared.has_all_of(&set(&[])) && !shared.has_all_of(&both));
        shared.store(&both);
        assert_eq!(shared.load(), both);
        assert!(shared.has_all_of(&set(&[8191])) && shared.has_all_of(&both));
        assert!(!shared.has_all_of(&set(&[1])) && !shared.has_all_of(&set(&[0, 64])));
        both.add(&set(&[1, 64]));
        assert_eq!((both, both.len()), (set(&[0, 1, 64, 8191]), 4));
    }

    #[test]
    fn the_names_in_a_folder_are_found_however_many_there_are() {
        let folder = groups("names", &[]);
        let expected: Vec<String> = (0..300).map(|number| format!("name{number}")).collect();
        fs::create_dir_all(&folder).unwrap();
        for name in &expected {
            fs::write(format!("{folder}/{name}"), "").unwrap();
        }
        let (mut found, mut room, mut reads) = (Vec::new(), [0; 1000], 0);
        let opened = File::open([folder.as_bytes(), b"", b""]).unwrap();
        while let Some(entries) = opened.entries(&mut room) {
            found.extend(names(entries).map(|name| str::from_utf8(name).unwrap().to_owned()));
            reads += 1;
        }
        fs::remove_dir_all(folder).unwrap();
        found.retain(|name| number::<i32>(name.as_bytes()).is_none() && !name.starts_with('.'));
        found.sort_by_key(|name| name.trim_start_matches("name").parse::<u32>().unwrap());
        assert!(reads > 5, "{reads}");
        assert_eq!(found, expected);
    }

    #[test]
    fn the_group_is_that_of_the_cpu_controller_or_of_version_2() {
        for (text, expected) in [
            ("0::/user.slice/a.scope\n", Some(Group::V2(b"/user.slice/a.scope"))),
            ("0::/\n", Some(Group::V2(b"/"))),
            ("0::/with:colons:in it", Some(Group::V2(b"/with:colons:in it"))),
            ("12:cpuset:/x\n4:cpu,cpuacct:/docker/1\n0::/y\n", Some(Group::V1(b"/docker/1"))),
            ("0::/y\n1:cpuacct,cpu:/z\n", Some(Group::V1(b"/z"))),
            ("3:cpuset:/x\n2:name=systemd:/x\n1:cpuacct:/x\n", None),
            ("2:name=systemd:/x\n0::/y", Some(Group::V2(b"/y"))),
            ("", None),
            ("\n\nno colons\none:colon\n", None),
        ] {
            assert_eq!(group_of(text.as_bytes()), expected, "{text:?}");
        }
    }

    #[test]
    fn a_group_is_followed_by_those_above_it() {
        for (path, expected) in [
            ("/a/b/c", &["/a/b/c", "/a/b", "/a", ""][..]),
            ("/a", &["/a", ""]),
            ("/a/", &["/a", ""]),
            ("/", &[""]),
            ("", &[""]),
            ("/../..", &["/../..", "/..", ""]),
        ] {
            let groups: Vec<_> = with_ancestors(path.as_bytes()).map(|group| str::from_utf8(group).unwrap()).collect();
            assert_eq!(groups, expected, "{path}");
        }
    }

    #[test]
    fn a_quota_is_rounded_down_to_whole_cpus() {
        for (text, expected) in [
            ("max 100000\n", None),
            ("400000 100000\n", Some(4)),
            ("399999 100000\n", Some(3)),
            ("50000 100000", Some(0)),
            ("250000 50000\n", Some(5)),
            ("100000 0\n", None),
            ("100000\n", None),
            ("99999999999999999999 100000\n", None),
            ("\n", None),
            ("", None),
        ] {
            assert_eq!(cpu_max(text.as_bytes()), expected, "{text:?}");
        }
        for (limit, period, expected) in [
            ("-1\n", "100000\n", None),
            ("200000\n", "100000\n", Some(2)),
            ("150000\n", "100000\n", Some(1)),
            ("1000\n", "100000\n", Some(0)),
            ("200000\n", "0\n", None),
            ("200000\n", "\n", None),
        ] {
            assert_eq!(whole_cpus(limit.as_bytes(), period.as_bytes()), expected, "{limit:?} {period:?}");
        }
    }

    /// Folders as cgroups make them, with one limit in each file of `limits`.
    fn groups(name: &str, limits: &[(&str, &str)]) -> String {
        let mount = format!("{}/gradcodec-{name}-{}", std::env::temp_dir().display(), std::process::id());
        for (path, text) in limits {
            let path = format!("{mount}{path}");
            fs::create_dir_all(path.rsplit_once('/').unwrap().0).unwrap();
            fs::write(path, text).unwrap();
        }
        mount
    }

    #[test]
    fn the_smallest_quota_above_a_group_counts() {
        let two = groups(
            "two",
            &[("/cpu.max", "800000 100000\n"), ("/a/cpu.max", "300000 100000\n"), ("/a/b/cpu.max", "max 100000\n")],
        );
        let one = groups(
            "one",
            &[
                ("/cpu.cfs_quota_us", "700000\n"),
                ("/cpu.cfs_period_us", "100000\n"),
                ("/a/b/cpu.cfs_quota_us", "-1\n"),
                ("/a/b/cpu.cfs_period_us", "100000\n"),
            ],
        );
        for (path, v2, v1) in [("/a/b", 3, 7), ("/a", 3, 7), ("/", 8, 7), ("/not/there", 8, 7), ("/../..", 8, 7)] {
            let path = path.as_bytes();
            assert_eq!(least(path, |group| quota_v2(two.as_bytes(), group)), Some(v2));
            assert_eq!(least(path, |group| quota_v1(one.as_bytes(), group)), Some(v1));
        }
        assert_eq!(least(b"/a", |group| quota_v2(one.as_bytes(), group)), None);
        for folder in [one, two] {
            fs::remove_dir_all(folder).unwrap();
        }
    }

    #[test]
    fn whole_lines_of_a_long_file_are_read() {
        let folder = groups("long", &[("/text", "one\ntwo\nthree\n")]);
        for (room, expected) in [(64, Some("one\ntwo\nthree\n")), (9, Some("one\ntwo")), (4, Some("one")), (3, None)] {
            let mut buffer = vec![0; room];
            let text = read([folder.as_bytes(), b"/text", b""], &mut buffer);
            assert_eq!(text.map(|text| str::from_utf8(text).unwrap()), expected, "{room}");
        }
        let mut buffer = [0; 64];
        assert_eq!(read([folder.as_bytes(), b"/none", b""], &mut buffer), None);
        assert_eq!(read([&[b'x'; libc::PATH_MAX as usize], b"", b""], &mut buffer), None);
        fs::remove_dir_all(folder).unwrap();
    }
}
