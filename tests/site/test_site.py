"""Tests of the site that `make site` has built: every link leads somewhere, nothing is fetched from elsewhere. In
Chromium no page moves sideways on a phone or logs an error, and the search finds a function."""

import html.parser
import pathlib
import re
import shutil
import urllib.parse

import pytest

SITE = pathlib.Path(__file__).resolve().parents[2] / "build/site"
HEADER = (SITE.parents[1] / "include/gradcodec.h").read_text()
PAGES = sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html"))
PHONE, DESK = 375, 1280


class Page(html.parser.HTMLParser):
    """Links of a page, files that it needs, and places in it to which others may link."""

    def __init__(self, path):
        super().__init__()
        self.links, self.needs, self.places = [], [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.places |= {attributes[name] for name in ("id", "name") if attributes.get(name)}
        if tag == "a" and attributes.get("href"):
            self.links.append(attributes["href"])
        if tag in ("img", "script", "iframe") and attributes.get("src"):
            self.needs.append(attributes["src"])
        if tag == "link" and attributes.get("href") and attributes.get("rel") != "canonical":
            self.needs.append(attributes["href"])


@pytest.fixture(scope="module")
def pages():
    return {name: Page(SITE / name) for name in PAGES}


def test_pages_exist():
    assert {"index.html", "search.html", "genindex.html", "reference/bits.html", "docs/PERFORMANCE.html"} <= set(PAGES)


def test_no_link_is_broken(pages):
    broken = []
    for name, page in pages.items():
        for link in page.links + page.needs:
            address = urllib.parse.urlsplit(link)
            if address.scheme:
                continue
            target = (SITE / name).parent / urllib.parse.unquote(address.path) if address.path else SITE / name
            place = urllib.parse.unquote(address.fragment)
            try:
                found = str(target.resolve().relative_to(SITE))
            except ValueError:
                found = "outside"
            if not target.is_file() or (place and found in pages and place not in pages[found].places):
                broken.append(f"{name}: {link}")
    assert broken == []


def test_titles_are_short_and_links_to_pages_read_as_titles():
    titles = re.findall(r'<li class="toctree-l1[^"]*"><a [^>]*>([^<]*)</a>', (SITE / "index.html").read_text())
    assert {"CPU threads", "NCCL", "Codecs"} <= set(titles) and max(map(len, titles)) <= 35
    link = re.compile(r'<a class="reference internal"[^>]*>(?:<\w+[^>]*>)*([^<]*\.md)<')
    assert [(name, found) for name in PAGES for found in link.findall((SITE / name).read_text())] == []


def test_nothing_is_fetched_from_other_sites(pages):
    assert [need for page in pages.values() for need in page.needs if urllib.parse.urlsplit(need).scheme] == []


def test_every_function_of_the_header_has_its_place(pages):
    functions = set(re.findall(r"^\w[\w *]*\b(gc_\w+)\(", HEADER, re.M))
    places = {place for name, page in pages.items() if name.startswith("reference/") for place in page.places}
    assert len(functions) >= 90
    assert [name for name in sorted(functions) if f"c.{name}" not in places] == []


def test_everything_that_the_python_package_exports_has_its_place(pages):
    package = SITE.parents[1] / "python/gradcodec"
    modules = {"gradcodec": "__init__.py", "gradcodec.torch": "torch.py", "gradcodec.jax": "jax.py"}
    for module, file in modules.items():
        listed = re.search(r"^__all__ = \[(.*?)\]", (package / file).read_text(), re.M | re.S)[1]
        names = [name for name in re.findall(r'"(\w+)"', listed) if not name.startswith("__")]
        page = f"reference/{module.replace('.', '_')}.html"
        text, places = (SITE / page).read_text(), pages[page].places
        lost = [name for name in names if f"{module}.{name}" not in places and f">{name}<" not in text]
        assert len(names) >= 6 and lost == [], module
        defined = [text.index(f'id="{module}.{name}"') for name in names if f"{module}.{name}" in places]
        assert len(defined) >= 6 and defined == sorted(defined), f"{module}: in the order of __all__"
    methods = {"Codec.encode", "AllReduce.commit", "Kernel.__call__", "Share.close", "GradCodec.pack_signs_into"}
    assert {f"gradcodec.{name}" for name in methods} <= pages["reference/gradcodec.html"].places


def test_getting_started_comes_first_and_python_before_c(pages):
    links = [link for link in pages["docs/PERFORMANCE.html"].links if link.endswith(".html")]
    order = [links.index(page) for page in ("START.html", "CHOOSING.html", "../reference/gradcodec.html",
                                            "../reference/functions.html")]  # fmt: skip
    assert order == sorted(order) and not any("CHOOSING" in link for link in links[: order[0]])


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not program or not driver:
        pytest.skip("NOT RUN, because there is no chromium with chromedriver here")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = program
    for option in (
        "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):  # fmt: skip
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield browser
    browser.quit()


def as_wide_as(browser, width):
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width == PHONE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_its_window_and_logs_no_error(browser, name, width):
    as_wide_as(browser, width)
    browser.get((SITE / name).as_uri())
    browser.execute_script("window.scrollTo(1000, 0)")
    root = "document.documentElement"
    inner, client, content, moved = browser.execute_script(
        f"return [window.innerWidth, {root}.clientWidth, {root}.scrollWidth, window.scrollX]"
    )
    assert (inner, content, moved) == (width, client, 0)  # client: without a scroll bar
    # Tables, code and signatures may scroll within themselves, and nothing around them.
    scrolling = browser.execute_script(
        "return [...document.querySelectorAll('body, body *')]"
        ".filter(it => it.scrollWidth > it.clientWidth + 1 && !['visible', 'clip'].includes(getComputedStyle(it).overflowX))"
        ".map(it => `${it.tagName.toLowerCase()} ${it.className}`)"
    )
    allowed = re.compile(r"pre|dt sig|div (highlight|table-wrapper)|(label|span|input|aside|button) |div sidebar")
    assert [it for it in scrolling if not allowed.match(it)] == []
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("words", ["gc_pack_chunks", "error feedback", "GRADCODEC_CPU"])
def test_the_search_finds_functions(browser, words):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    as_wide_as(browser, DESK)
    browser.get((SITE / "index.html").as_uri())
    box = browser.find_element(By.CSS_SELECTOR, "input[name=q]")
    box.send_keys(words)
    box.submit()
    found = WebDriverWait(browser, 60).until(lambda _: browser.find_elements(By.CSS_SELECTOR, "#search-results li a"))
    addresses = [link.get_attribute("href") for link in found]
    if words.startswith("gc_"):
        assert any(address.endswith(f"reference/bits.html#c.{words}") for address in addresses)
    assert browser.get_log("browser") == []
